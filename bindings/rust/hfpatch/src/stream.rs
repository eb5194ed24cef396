use std::ffi::c_void;

/// A CUDA stream; the default one on the CPU, where it means nothing.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub(crate) *mut c_void);

impl Stream {
    /// A `cudaStream_t` or `CUstream`.
    ///
    /// # Safety
    /// It must be one of the device of the tensors and live until the work is done.
    pub unsafe fn from_raw(stream: *mut c_void) -> Self {
        Stream(stream)
    }
}

impl Default for Stream {
    fn default() -> Self {
        Stream(std::ptr::null_mut())
    }
}
