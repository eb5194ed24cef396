//! Loads the PTX that `hfpatch kernel build --ptx DIR` wrote, by the driver API, and launches by name.
//!
//!     cargo run -- DIR
//!
//! Needs an NVIDIA driver; no CUDA toolkit and no crate: libcuda is loaded at run time.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void, CString};
use std::{env, error::Error, fs, mem, ptr};

extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Driver {
    library: *mut c_void,
}

/// Calls a function of libcuda of that type; an error names it.
macro_rules! cuda {
    ($driver:expr, $name:ident ( $($kind:ty),* ), $($argument:expr),*) => {{
        let function: unsafe extern "C" fn($($kind),*) -> c_int =
            unsafe { mem::transmute($driver.find(stringify!($name))?) };
        match unsafe { function($($argument),*) } {
            0 => Ok::<(), Box<dyn Error>>(()),
            status => Err(format!("{} failed with status {status}", stringify!($name)).into()),
        }
    }};
}

impl Driver {
    fn load() -> Result<Self> {
        let name = CString::new("libcuda.so.1")?;
        let library = unsafe { dlopen(name.as_ptr(), 2) };
        if library.is_null() {
            return Err("no NVIDIA driver: libcuda.so.1 was not found".into());
        }
        Ok(Self { library })
    }

    fn find(&self, name: &str) -> Result<*mut c_void> {
        let symbol = CString::new(name)?;
        let found = unsafe { dlsym(self.library, symbol.as_ptr()) };
        if found.is_null() {
            return Err(format!("libcuda has no {name}; install a newer driver").into());
        }
        Ok(found)
    }
}

/// Kernels by name, and how often each was launched.
struct Kernels<'a> {
    driver: &'a Driver,
    found: BTreeMap<&'static str, (*mut c_void, usize)>,
}

impl Kernels<'_> {
    fn launch(&mut self, name: &str, grid: u32, block: u32, arguments: &mut [*mut c_void]) -> Result<()> {
        let (function, launches) =
            self.found.get_mut(name).ok_or_else(|| format!("there is no kernel `{name}`"))?;
        cuda!(self.driver, cuLaunchKernel(*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
              c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void),
              *function, grid, 1, 1, block, 1, 1, 0, ptr::null_mut(), arguments.as_mut_ptr(),
              ptr::null_mut())?;
        *launches += 1;
        Ok(())
    }
}

/// The file of the newest architecture that this GPU runs.
fn newest(folder: &str, arch: i32) -> Result<CString> {
    for arch in (75..=arch).rev() {
        if let Ok(text) = fs::read(format!("{folder}/relu_squared.sm_{arch}.ptx")) {
            return Ok(CString::new(text)?);
        }
    }
    Err(format!("{folder} has no PTX for this GPU; build it with --archs").into())
}

fn address<T>(value: &mut T) -> *mut c_void {
    (value as *mut T).cast()
}

fn main() -> Result<()> {
    const N: usize = 1000;
    const BLOCK: u32 = 256;
    let blocks = (N as u32).div_ceil(BLOCK);
    let folder = env::args().nth(1).ok_or("usage: launch DIR")?;
    let driver = Driver::load()?;
    let (mut device, mut major, mut minor) = (0, 0, 0);
    let (mut context, mut module) = (ptr::null_mut(), ptr::null_mut());
    cuda!(driver, cuInit(c_uint), 0)?;
    cuda!(driver, cuDeviceGet(*mut c_int, c_int), &mut device, 0)?;
    cuda!(driver, cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int), &mut context, device)?;
    cuda!(driver, cuCtxSetCurrent(*mut c_void), context)?;
    cuda!(driver, cuDeviceGetAttribute(*mut c_int, c_int, c_int), &mut major, 75, device)?;
    cuda!(driver, cuDeviceGetAttribute(*mut c_int, c_int, c_int), &mut minor, 76, device)?;
    let text = newest(&folder, major * 10 + minor)?;
    cuda!(driver, cuModuleLoadData(*mut *mut c_void, *const c_char), &mut module, text.as_ptr())?;
    let mut kernels = Kernels { driver: &driver, found: BTreeMap::new() };
    for name in ["relu_squared", "block_sums"] {
        let (mut function, symbol) = (ptr::null_mut(), CString::new(name)?);
        cuda!(driver, cuModuleGetFunction(*mut *mut c_void, *mut c_void, *const c_char), &mut function,
              module, symbol.as_ptr())?;
        kernels.found.insert(name, (function, 0));
    }

    let x: Vec<f32> = (0..N).map(|i| (i % 7) as f32 - 3.0).collect();
    let mut sums = vec![0f32; blocks as usize];
    let mut memory = [0u64; 3];
    for (pointer, size) in memory.iter_mut().zip([4 * N, 4 * N, 4 * sums.len()]) {
        cuda!(driver, cuMemAlloc_v2(*mut u64, usize), pointer, size)?;
    }
    let [mut source, mut squared, mut totals] = memory;
    let mut count = N as c_int;
    cuda!(driver, cuMemcpyHtoD_v2(u64, *const f32, usize), source, x.as_ptr(), 4 * N)?;
    kernels.launch("relu_squared", blocks, BLOCK,
                   &mut [address(&mut squared), address(&mut source), address(&mut count)])?;
    kernels.launch("block_sums", blocks, BLOCK,
                   &mut [address(&mut totals), address(&mut squared), address(&mut count)])?;
    cuda!(driver, cuMemcpyDtoH_v2(*mut f32, u64, usize), sums.as_mut_ptr(), totals, 4 * sums.len())?;
    for pointer in memory {
        cuda!(driver, cuMemFree_v2(u64), pointer)?;
    }
    println!("sum {:.1}", sums.iter().sum::<f32>());
    let counted: Vec<String> = kernels.found.iter().map(|(k, v)| format!("{k} {}", v.1)).collect();
    println!("launches {}", counted.join(" "));
    Ok(())
}
