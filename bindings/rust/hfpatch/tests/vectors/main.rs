//! Goes through the file of calls that `HFPATCH_VECTORS` names (tests/clib/vectors.py). With
//! `HFPATCH_VECTORS_STUB=1` every call answers that the stub is linked.
mod dispatch;

use hfpatch::{DType, Device, Result, Stream, TensorView, TensorViewMut};
use std::ffi::c_void;

struct View {
    memory: usize,
    dtype: DType,
    shape: Vec<i64>,
    strides: Vec<i64>,
    offset: usize,
}

enum Value {
    Null,
    Float(f64),
    Int(i64),
    Use(usize),
    List(Vec<i64>),
}

#[derive(Default)]
pub struct Call {
    name: String,
    function: String,
    status: i32,
    message: String,
    // Of 64 bits, so that every dtype is aligned.
    memory: Vec<Vec<u64>>,
    views: Vec<View>,
    values: Vec<Value>,
    expected: Vec<(usize, f64, Vec<f64>)>,
}

impl Call {
    fn address(&self, view: &View) -> *mut c_void {
        let start = self.memory[view.memory].as_ptr().cast_mut().cast::<u8>();
        start.wrapping_add(view.offset * view.dtype.bits as usize / 8).cast()
    }

    fn read(&self, index: usize) -> TensorView<'_> {
        let v = &self.views[index];
        let (shape, strides) = (&v.shape, Some(v.strides.as_slice()));
        unsafe { TensorView::from_raw(self.address(v), v.dtype, Device::Cpu, shape, strides) }
    }

    fn write(&self, index: usize) -> TensorViewMut<'_> {
        let v = &self.views[index];
        let (shape, strides) = (&v.shape, Some(v.strides.as_slice()));
        unsafe { TensorViewMut::from_raw(self.address(v), v.dtype, Device::Cpu, shape, strides) }
    }

    fn used(&self, i: usize) -> Option<usize> {
        match self.values[i] {
            Value::Use(index) => Some(index),
            Value::Null => None,
            _ => panic!("{}: argument {i} is no tensor", self.name),
        }
    }

    fn tensor_or_none(&self, i: usize) -> Option<TensorView<'_>> {
        self.used(i).map(|index| self.read(index))
    }

    fn tensor(&self, i: usize) -> TensorView<'_> {
        self.tensor_or_none(i).unwrap_or_else(TensorView::null)
    }

    fn result_or_none(&self, i: usize) -> Option<TensorViewMut<'_>> {
        self.used(i).map(|index| self.write(index))
    }

    fn result(&self, i: usize) -> TensorViewMut<'_> {
        self.result_or_none(i).unwrap_or_else(TensorViewMut::null)
    }

    fn indices(&self, i: usize) -> &[i64] {
        match &self.values[i] {
            Value::List(found) => found,
            _ => panic!("{}: argument {i} is no list", self.name),
        }
    }

    fn list(&self, i: usize) -> Vec<TensorView<'_>> {
        let one = |&v: &i64| usize::try_from(v).map_or(TensorView::null(), |v| self.read(v));
        self.indices(i).iter().map(one).collect()
    }

    fn list_mut(&self, i: usize) -> Vec<TensorViewMut<'_>> {
        let one = |&v: &i64| usize::try_from(v).map_or(TensorViewMut::null(), |v| self.write(v));
        self.indices(i).iter().map(one).collect()
    }

    fn float(&self, i: usize) -> f64 {
        match self.values[i] {
            Value::Float(found) => found,
            _ => panic!("{}: argument {i} is no float", self.name),
        }
    }

    fn int(&self, i: usize) -> i64 {
        match self.values[i] {
            Value::Int(found) => found,
            _ => panic!("{}: argument {i} is no integer", self.name),
        }
    }

    fn line(&mut self, word: &str, rest: &str) {
        match word {
            "function" => self.function = rest.into(),
            "tensor" => {
                let parts: Vec<&str> = rest.split(" | ").collect();
                let head = integers(parts[0]);
                let zeros = parts[4] == "zeros";
                let mut bytes = if zeros { vec![0; head[3] as usize] } else { bytes_of(parts[4]) };
                assert_eq!(bytes.len() as i64, head[3]);
                bytes.resize(bytes.len().div_ceil(8).max(1) * 8, 0);
                let words = bytes.chunks_exact(8);
                self.memory.push(words.map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect());
                let dtype = DType { code: head[1] as u8, bits: head[2] as u8 };
                self.view(self.memory.len() - 1, dtype, &parts[1..]);
            }
            "view" => {
                let parts: Vec<&str> = rest.split(" | ").collect();
                let of = &self.views[integers(parts[0])[1] as usize];
                let (memory, dtype) = (of.memory, of.dtype);
                self.view(memory, dtype, &parts[1..]);
            }
            "host" => {} // all are
            "address" => {
                let numbers = integers(rest);
                let address = self.address(&self.views[numbers[2] as usize]) as u64;
                let table = self.views[numbers[0] as usize].memory;
                self.memory[table][numbers[1] as usize] = address;
            }
            "null" => self.values.push(Value::Null),
            "float" => self.values.push(Value::Float(float_of(rest))),
            "int" => self.values.push(Value::Int(rest.parse().unwrap())),
            "use" => self.values.push(Value::Use(rest.parse().unwrap())),
            "list" => self.values.push(Value::List(integers(rest))),
            "status" => self.status = rest.parse().unwrap(),
            "message" => self.message = rest.into(),
            "expect" => {
                let parts: Vec<&str> = rest.split(' ').collect();
                let values = bytes_of(parts[2]);
                let values = values.chunks_exact(8);
                let values = values.map(|v| f64::from_be_bytes(v.try_into().unwrap())).collect();
                self.expected.push((parts[0].parse().unwrap(), float_of(parts[1]), values));
            }
            other => panic!("no line begins with `{other}`"),
        }
    }

    fn view(&mut self, memory: usize, dtype: DType, parts: &[&str]) {
        let shape = integers(parts[0])[1..].to_vec();
        let offset = parts[2].parse().unwrap();
        self.views.push(View { memory, dtype, shape, strides: integers(parts[1]), offset });
    }

    fn element(&self, index: usize, i: usize) -> f64 {
        let view = &self.views[index];
        let at = self.memory[view.memory].as_ptr();
        let bits = |i: usize| unsafe { *at.cast::<u16>().add(i) };
        match view.dtype {
            DType::F32 => f64::from(unsafe { *at.cast::<f32>().add(i) }),
            DType::I64 => (unsafe { *at.cast::<i64>().add(i) }) as f64,
            DType::BF16 => f64::from(f32::from_bits(u32::from(bits(i)) << 16)),
            DType::F16 => half(bits(i)),
            DType { bits: 8, .. } => f64::from(unsafe { *at.cast::<u8>().add(i) }),
            other => panic!("{other:?}"),
        }
    }

    /// What is not as expected.
    fn wrong(&self, stub: bool) -> Option<String> {
        let (status, said) = match dispatch::call(&self.function, self) {
            Ok(()) => (0, String::new()),
            Err(error) => (error.code(), error.message().to_string()),
        };
        if stub {
            let right = format!("{}: this is the stub of libhfpatch, ", self.function);
            return (status != -1 || !said.starts_with(&right)).then(|| format!("{status} {said}"));
        }
        if status != self.status || said != self.message {
            let right = (self.status, &self.message);
            return Some(format!("expected {right:?}, got {:?}", (status, said)));
        }
        for (index, tolerance, values) in &self.expected {
            for (i, right) in values.iter().enumerate() {
                let value = self.element(*index, i);
                let both = value.is_nan() && right.is_nan();
                if both || value == *right || (value - right).abs() <= *tolerance {
                    continue;
                }
                return Some(format!("tensor {index}[{i}]: expected {right}, got {value}"));
            }
        }
        None
    }
}

fn half(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let found = match exponent {
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        0 => fraction * 2f64.powi(-24),
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -found } else { found }
}

fn integers(text: &str) -> Vec<i64> {
    text.split_whitespace().map(|n| n.parse().unwrap()).collect()
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits = hex.trim_start_matches('-').as_bytes().chunks_exact(2);
    digits.map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
}

fn float_of(hex: &str) -> f64 {
    f64::from_bits(u64::from_str_radix(hex, 16).unwrap())
}

#[test]
fn vectors() {
    let Ok(path) = std::env::var("HFPATCH_VECTORS") else {
        println!("HFPATCH_VECTORS is not set: nothing to go through");
        return;
    };
    let stub = std::env::var("HFPATCH_VECTORS_STUB").is_ok_and(|v| v == "1");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let (mut count, mut failed) = (0, 0);
    let mut call = Call::default();
    for line in text.lines() {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "case" => call = Call { name: rest.into(), ..Call::default() },
            "end" => {
                count += 1;
                if let Some(why) = call.wrong(stub) {
                    failed += 1;
                    println!("FAIL {}: {why}", call.name);
                }
            }
            _ => call.line(word, rest),
        }
    }
    println!("{count} cases, {failed} failed");
    assert!(count > 0 && failed == 0, "{failed} of {count} cases failed");
}

#[test]
fn a_view_stays_within_its_memory() {
    let data = [0f32; 6];
    let said = |shape: &[i64]| TensorView::new(&data, shape).err().map(|e| e.message().to_string());
    assert_eq!(said(&[2, 3]), None);
    assert_eq!(said(&[0, 9]), None);
    assert_eq!(
        said(&[2, 4]).unwrap(),
        "a view of 6 elements with shape [2, 4]: expected it to stay within them"
    );
    assert!(said(&[-1]).unwrap().ends_with("expected sizes >= 0"));
    assert!(said(&[i64::MAX, i64::MAX, i64::MAX]).is_some());
    assert!(TensorView::strided(&data, &[2, 2], &[4, 1]).is_ok());
    assert!(TensorView::strided(&data, &[2, 2], &[5, 1]).is_err());
    assert!(TensorView::strided(&data, &[2], &[-1]).is_err());
    assert!(TensorView::strided(&data, &[2, 2], &[1]).is_err());
    assert!(TensorView::new::<f32>(&[], &[]).is_err());
}

#[test]
fn the_library_is_of_the_bindings_version() {
    assert_eq!(hfpatch::abi_version(), hfpatch_sys::HFP_ABI_VERSION);
    assert!(hfpatch::build_info().starts_with("{\"abi\": "));
}

#[test]
fn an_error_says_what_is_wrong() {
    let data = [1f32; 4];
    let mut out = [0f32; 4];
    let done: Result<()> = hfpatch::silu(
        &mut TensorViewMut::new(&mut out, &[2]).unwrap(),
        &TensorView::new(&data, &[4]).unwrap(),
        Stream::default(),
    );
    let error = done.unwrap_err();
    if error.status() != hfpatch::Status::NotAvailable {
        assert_eq!(error.status(), hfpatch::Status::InvalidArgument);
        assert_eq!(
            error.to_string(),
            "hfp_silu: `out` must have shape [4] to match `x`, got [2]"
        );
    }
}
