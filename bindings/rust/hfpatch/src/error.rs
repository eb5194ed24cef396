use hfpatch_sys as sys;
use std::ffi::CStr;
use std::fmt;

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// This build has no kernel for that device, or is the stub: compute it another way.
    NotAvailable,
    /// A dtype, device, shape, stride, alignment or value.
    InvalidArgument,
    /// The CUDA runtime refused the launch.
    LaunchFailed,
    /// The host has no memory left.
    OutOfMemory,
    /// One of a newer library.
    Other(i32),
}

/// A call that failed; nothing was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    code: i32,
    message: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn invalid(message: String) -> Self {
        Error { code: sys::HFP_INVALID_ARGUMENT, message }
    }

    pub fn status(&self) -> Status {
        match self.code {
            sys::HFP_NOT_AVAILABLE => Status::NotAvailable,
            sys::HFP_INVALID_ARGUMENT => Status::InvalidArgument,
            sys::HFP_LAUNCH_FAILED => Status::LaunchFailed,
            sys::HFP_OUT_OF_MEMORY => Status::OutOfMemory,
            other => Status::Other(other),
        }
    }

    /// The number that C has for it.
    pub fn code(&self) -> i32 {
        self.code
    }

    /// The argument, what was expected and what came.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

pub(crate) fn check(status: i32) -> Result<()> {
    if status == sys::HFP_OK {
        return Ok(());
    }
    let message = unsafe { CStr::from_ptr(sys::hfp_last_error()) };
    Err(Error { code: status, message: message.to_string_lossy().into_owned() })
}

/// The answer of a function that says how large a buffer must be.
pub(crate) fn size(found: i64) -> Result<i64> {
    match i32::try_from(found) {
        Ok(status) if status < 0 => check(status).map(|()| found),
        _ => Ok(found),
    }
}
