use crate::error::{Error, Result};
use hfpatch_sys as sys;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DType {
    /// `kDLFloat`, `kDLBfloat`, `kDLInt` or `kDLUInt` of hfpatch-sys.
    pub code: u8,
    pub bits: u8,
}

impl DType {
    pub const F32: DType = DType { code: sys::kDLFloat, bits: 32 };
    pub const F16: DType = DType { code: sys::kDLFloat, bits: 16 };
    pub const BF16: DType = DType { code: sys::kDLBfloat, bits: 16 };
    pub const I64: DType = DType { code: sys::kDLInt, bits: 64 };
}

/// Where a tensor's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Cuda(i32),
}

/// The bits of a half; any crate's type of 16 bits can be read as this one.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct F16(pub u16);

/// The bits of a bfloat16.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bf16(pub u16);

mod sealed {
    pub trait Sealed {}
}

/// What a tensor on the CPU may hold.
pub trait Element: Copy + sealed::Sealed {
    const DTYPE: DType;
}

macro_rules! element {
    ($type:ty, $dtype:expr) => {
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = $dtype;
        }
    };
}
element!(f32, DType::F32);
element!(F16, DType::F16);
element!(Bf16, DType::BF16);
element!(i64, DType::I64);

/// What both kinds of views are: memory that is borrowed for `'a`.
#[derive(Clone, Debug)]
struct View {
    data: *mut c_void,
    dtype: DType,
    device: Device,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    null: bool,
}

/// A tensor that is read.
#[derive(Clone, Debug)]
pub struct TensorView<'a>(View, PhantomData<&'a [u8]>);

/// A tensor that is written.
#[derive(Debug)]
pub struct TensorViewMut<'a>(View, PhantomData<&'a mut [u8]>);

/// The elements that a view reaches beyond its first, or an error where it leaves `len`.
fn fits(len: usize, shape: &[i64], strides: Option<&[i64]>) -> Result<()> {
    let refused = |why: &str| {
        let of = strides.map(|s| format!(" and strides {s:?}")).unwrap_or_default();
        Err(Error::invalid(format!(
            "a view of {len} elements with shape {shape:?}{of}: {why}"
        )))
    };
    if strides.is_some_and(|s| s.len() != shape.len()) {
        return refused("expected as many strides as dimensions");
    }
    if shape.iter().any(|&size| size < 0) {
        return refused("expected sizes >= 0");
    }
    if shape.contains(&0) {
        return Ok(());
    }
    let mut reach: i128 = 0;
    let mut contiguous: i128 = 1;
    for (i, &size) in shape.iter().enumerate().rev() {
        let step = strides.map_or(contiguous, |s| i128::from(s[i]));
        if step < 0 {
            return refused("expected strides >= 0");
        }
        // Products of 64-bit numbers fit 128 bits; a sum that is too large is refused at once.
        reach += i128::from(size - 1) * step;
        contiguous = contiguous.saturating_mul(i128::from(size));
        if reach >= len as i128 {
            return refused("expected it to stay within them");
        }
    }
    if len == 0 {
        return refused("expected it to stay within them");
    }
    Ok(())
}

impl View {
    fn of<T: Element>(
        data: *mut T,
        len: usize,
        shape: &[i64],
        strides: Option<&[i64]>,
    ) -> Result<View> {
        fits(len, shape, strides)?;
        Ok(View {
            data: data.cast(),
            dtype: T::DTYPE,
            device: Device::Cpu,
            shape: shape.to_vec(),
            strides: strides.map(<[i64]>::to_vec),
            null: false,
        })
    }

    fn from_raw(
        data: *mut c_void,
        dtype: DType,
        device: Device,
        shape: &[i64],
        strides: Option<&[i64]>,
    ) -> View {
        let (shape, strides) = (shape.to_vec(), strides.map(<[i64]>::to_vec));
        View { data, dtype, device, shape, strides, null: false }
    }

    fn raw(&self) -> Raw<'_> {
        let (device_type, device_id) = match self.device {
            Device::Cpu => (sys::kDLCPU, 0),
            Device::Cuda(id) => (sys::kDLCUDA, id),
        };
        let strides = self.strides.as_ref().map_or(ptr::null_mut(), |s| s.as_ptr().cast_mut());
        let tensor = sys::DLTensor {
            data: self.data,
            device: sys::DLDevice { device_type, device_id },
            ndim: self.shape.len() as i32,
            dtype: sys::DLDataType { code: self.dtype.code, bits: self.dtype.bits, lanes: 1 },
            shape: self.shape.as_ptr().cast_mut(),
            strides,
            byte_offset: 0,
        };
        Raw { tensor: (!self.null).then_some(tensor), view: PhantomData }
    }

    fn null() -> View {
        let mut view = View::from_raw(ptr::null_mut(), DType::F32, Device::Cpu, &[], None);
        view.null = true;
        view
    }
}

impl<'a> TensorView<'a> {
    /// A contiguous tensor in memory of the CPU.
    ///
    /// # Errors
    /// `shape` needs more elements than `data` has.
    pub fn new<T: Element>(data: &'a [T], shape: &[i64]) -> Result<Self> {
        Ok(Self(View::of(data.as_ptr().cast_mut(), data.len(), shape, None)?, PhantomData))
    }

    /// A strided one; strides count elements.
    ///
    /// # Errors
    /// It leaves `data`, or a stride is below 0.
    pub fn strided<T: Element>(data: &'a [T], shape: &[i64], strides: &[i64]) -> Result<Self> {
        let data_ptr = data.as_ptr().cast_mut();
        Ok(Self(View::of(data_ptr, data.len(), shape, Some(strides))?, PhantomData))
    }

    /// Any memory, such as a GPU's. `strides`: in elements, or None for a contiguous tensor.
    ///
    /// # Safety
    /// The memory must be there on that device, as far as the view reaches, for `'a` and until the
    /// work of every call with it is done.
    pub unsafe fn from_raw(
        data: *const c_void,
        dtype: DType,
        device: Device,
        shape: &[i64],
        strides: Option<&[i64]>,
    ) -> Self {
        Self(View::from_raw(data.cast_mut(), dtype, device, shape, strides), PhantomData)
    }

    pub(crate) fn raw(&self) -> Raw<'_> {
        self.0.raw()
    }

    /// NULL, which every function that needs the tensor refuses.
    #[doc(hidden)]
    pub fn null() -> Self {
        Self(View::null(), PhantomData)
    }
}

impl<'a> TensorViewMut<'a> {
    /// See [`TensorView::new`].
    pub fn new<T: Element>(data: &'a mut [T], shape: &[i64]) -> Result<Self> {
        Ok(Self(View::of(data.as_mut_ptr(), data.len(), shape, None)?, PhantomData))
    }

    /// See [`TensorView::strided`].
    pub fn strided<T: Element>(data: &'a mut [T], shape: &[i64], strides: &[i64]) -> Result<Self> {
        let view = View::of(data.as_mut_ptr(), data.len(), shape, Some(strides))?;
        Ok(Self(view, PhantomData))
    }

    /// See [`TensorView::from_raw`]. A result may be the view of an input: in place.
    ///
    /// # Safety
    /// As there; nothing else may use the memory meanwhile.
    pub unsafe fn from_raw(
        data: *mut c_void,
        dtype: DType,
        device: Device,
        shape: &[i64],
        strides: Option<&[i64]>,
    ) -> Self {
        Self(View::from_raw(data, dtype, device, shape, strides), PhantomData)
    }

    pub(crate) fn raw(&mut self) -> Raw<'_> {
        self.0.raw()
    }

    #[doc(hidden)]
    pub fn null() -> Self {
        Self(View::null(), PhantomData)
    }
}

/// What C gets for one tensor.
pub(crate) struct Raw<'a> {
    tensor: Option<sys::DLTensor>,
    view: PhantomData<&'a ()>,
}

impl Raw<'_> {
    pub(crate) fn of(raw: Option<Self>) -> Self {
        raw.unwrap_or(Raw { tensor: None, view: PhantomData })
    }

    pub(crate) fn pointer(&mut self) -> *mut sys::DLTensor {
        self.tensor.as_mut().map_or(ptr::null_mut(), |t| ptr::from_mut(t))
    }
}

/// What C gets for a list of tensors.
pub(crate) struct List<'a> {
    // Not read, but pointed to.
    _tensors: Vec<sys::DLTensor>,
    pointers: Vec<*mut sys::DLTensor>,
    views: PhantomData<&'a ()>,
}

impl<'a> List<'a> {
    pub(crate) fn of(views: &'a [TensorView]) -> Self {
        Self::made(views.iter().map(|v| v.raw().tensor).collect())
    }

    pub(crate) fn of_mut(views: &'a mut [TensorViewMut]) -> Self {
        Self::made(views.iter_mut().map(|v| v.raw().tensor).collect())
    }

    fn made(found: Vec<Option<sys::DLTensor>>) -> Self {
        let present: Vec<bool> = found.iter().map(Option::is_some).collect();
        let mut tensors: Vec<sys::DLTensor> = found.into_iter().flatten().collect();
        let mut next = tensors.as_mut_ptr();
        let mut pointers = Vec::with_capacity(present.len());
        for there in present {
            pointers.push(if there { next } else { ptr::null_mut() });
            if there {
                next = next.wrapping_add(1);
            }
        }
        List { _tensors: tensors, pointers, views: PhantomData }
    }

    pub(crate) fn raw(&self) -> sys::HfpTensorList {
        sys::HfpTensorList { tensors: self.pointers.as_ptr(), count: self.pointers.len() as i64 }
    }
}
