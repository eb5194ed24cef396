//! Where the program has its tensors: in host memory, or on cuda:0 by the driver API. libcuda is loaded
//! at run time, so that nobody needs a CUDA toolkit to build it.
use hfpatch::{DType, Element, Result, TensorView, TensorViewMut};
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::{mem, ptr};

extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type Free = unsafe extern "C" fn(u64) -> c_int;
type Write = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
type Read = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int;

/// What is called of libcuda.
pub struct Cuda {
    alloc: Alloc,
    free: Free,
    write: Write,
    read: Read,
}

impl Cuda {
    /// cuda:0, or why it cannot be used.
    pub fn open() -> std::result::Result<Self, &'static str> {
        if !hfpatch::build_info().contains("\"cuda\"") {
            return Err("this libhfpatch was built without CUDA");
        }
        let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), 2) };
        if library.is_null() {
            return Err("no NVIDIA driver");
        }
        let find = |name: &CStr| match unsafe { dlsym(library, name.as_ptr()) } {
            found if found.is_null() => Err("the NVIDIA driver is too old"),
            found => Ok(found),
        };
        type Init = unsafe extern "C" fn(c_uint) -> c_int;
        type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
        type Set = unsafe extern "C" fn(*mut c_void) -> c_int;
        let (mut count, mut context) = (0, ptr::null_mut());
        unsafe {
            let init: Init = mem::transmute(find(c"cuInit")?);
            let devices: Count = mem::transmute(find(c"cuDeviceGetCount")?);
            let retain: Retain = mem::transmute(find(c"cuDevicePrimaryCtxRetain")?);
            let set: Set = mem::transmute(find(c"cuCtxSetCurrent")?);
            if init(0) != 0 || devices(&mut count) != 0 || count < 1 {
                return Err("no NVIDIA GPU");
            }
            // libhfpatch works in the primary context, as every program of the CUDA runtime does.
            if retain(&mut context, 0) != 0 || set(context) != 0 {
                return Err("the GPU cannot be used");
            }
            Ok(Cuda {
                alloc: mem::transmute::<*mut c_void, Alloc>(find(c"cuMemAlloc_v2")?),
                free: mem::transmute::<*mut c_void, Free>(find(c"cuMemFree_v2")?),
                write: mem::transmute::<*mut c_void, Write>(find(c"cuMemcpyHtoD_v2")?),
                read: mem::transmute::<*mut c_void, Read>(find(c"cuMemcpyDtoH_v2")?),
            })
        }
    }
}

fn succeeded(status: c_int) {
    assert_eq!(status, 0, "libcuda failed");
}

/// A tensor's memory, in Rust's or in the GPU's.
pub struct Array<'d, T: Element> {
    host: Vec<T>,
    device: Option<(&'d Cuda, u64)>,
}

impl<'d, T: Element> Array<'d, T> {
    pub fn new(cuda: Option<&'d Cuda>, host: Vec<T>) -> Self {
        let bytes = mem::size_of_val(host.as_slice());
        let device = cuda.map(|cuda| {
            let mut found = 0;
            succeeded(unsafe { (cuda.alloc)(&mut found, bytes.max(1)) });
            succeeded(unsafe { (cuda.write)(found, host.as_ptr().cast(), bytes) });
            (cuda, found)
        });
        Array { host, device }
    }

    pub fn len(&self) -> usize {
        self.host.len()
    }

    /// `shape` of it, after so many elements. strides: None where it is contiguous.
    pub fn view(&self, first: usize, shape: &[i64], strides: Option<&[i64]>) -> Result<TensorView<'_>> {
        let host = &self.host[first..];
        let checked = match strides {
            None => TensorView::new(host, shape)?,
            Some(strides) => TensorView::strided(host, shape, strides)?,
        };
        Ok(match self.device {
            None => checked,
            Some((_, at)) => unsafe {
                let data = (at as usize + first * mem::size_of::<T>()) as *const c_void;
                TensorView::from_raw(data, Self::DTYPE, hfpatch::Device::Cuda(0), shape, strides)
            },
        })
    }

    pub fn view_mut(&mut self, shape: &[i64]) -> Result<TensorViewMut<'_>> {
        let at = self.device.as_ref().map(|(_, at)| *at);
        let checked = TensorViewMut::new(&mut self.host, shape)?;
        Ok(match at {
            None => checked,
            Some(at) => unsafe {
                let data = at as usize as *mut c_void;
                TensorViewMut::from_raw(data, Self::DTYPE, hfpatch::Device::Cuda(0), shape, None)
            },
        })
    }

    /// What it holds, after what was launched on the default stream.
    pub fn read(&mut self) -> &[T] {
        if let Some((cuda, at)) = self.device {
            let bytes = mem::size_of_val(self.host.as_slice());
            succeeded(unsafe { (cuda.read)(self.host.as_mut_ptr().cast(), at, bytes) });
        }
        &self.host
    }

    const DTYPE: DType = T::DTYPE;
}

impl<T: Element> Drop for Array<'_, T> {
    fn drop(&mut self) {
        if let Some((cuda, at)) = self.device {
            unsafe { (cuda.free)(at) };
        }
    }
}
