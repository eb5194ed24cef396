//! Fused CPU and CUDA kernels for neural networks: libhfpatch.
//!
//! ```
//! use hfpatch::{TensorView, TensorViewMut, Stream};
//!
//! let x = [1.0f32, 2.0, 3.0];
//! let mut out = [0.0f32; 3];
//! let done = hfpatch::silu(
//!     &mut TensorViewMut::new(&mut out, &[3])?,
//!     &TensorView::new(&x, &[3])?,
//!     Stream::default(),
//! );
//! if let Err(error) = done {
//!     assert_eq!(error.status(), hfpatch::Status::NotAvailable); // the stub is linked
//! }
//! # Ok::<(), hfpatch::Error>(())
//! ```
//!
//! Results come first, as in C. The library validates every call before it computes: a shape, a
//! dtype or a value that does not fit is an [`Error`] that names the argument.
mod constants;
mod error;
mod ops;
mod stream;
mod tensor;

pub use constants::*;
pub use error::{Error, Result, Status};
pub use ops::*;
pub use stream::Stream;
pub use tensor::{Bf16, DType, Device, Element, TensorView, TensorViewMut, F16};

/// The version of the interface that the linked library has.
pub fn abi_version() -> i32 {
    unsafe { hfpatch_sys::hfp_abi_version() }
}

/// What the linked library was built for, as JSON.
pub fn build_info() -> &'static str {
    let text = unsafe { std::ffi::CStr::from_ptr(hfpatch_sys::hfp_build_info()) };
    text.to_str().expect("ASCII")
}
