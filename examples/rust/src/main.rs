//! One row of a tiny language model with libhfpatch: the token's embedding, an RMSNorm, a gated MLP
//! with a residual, the logits, and five tokens drawn from them; on the CPU, and on a GPU if there is one.
//!
//!     cargo run -- ../row.safetensors 7
//!
//! It prints what examples/row_pytorch.py prints.
mod device;

use device::{Array, Cuda};
use hfpatch::Stream;
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Matrix<'d> {
    data: Array<'d, f32>,
    shape: Vec<i64>,
}

impl Matrix<'_> {
    fn all(&self) -> hfpatch::Result<hfpatch::TensorView<'_>> {
        self.data.view(0, &self.shape, None)
    }
}

/// Where things are computed.
#[derive(Clone, Copy)]
struct Place<'d>(Option<&'d Cuda>);

impl<'d> Place<'d> {
    fn zeros(self, size: usize) -> Array<'d, f32> {
        Array::new(self.0, vec![0.0; size])
    }

    /// m x + c; m is a linear layer's weight, [outputs, inputs].
    fn product(self, m: &Matrix, x: &Array<f32>, c: Option<&Array<f32>>) -> Result<Array<'d, f32>> {
        let (outputs, inputs) = (m.shape[0], m.shape[1]);
        let device_type = if self.0.is_some() { 2 } else { 1 }; // kDLCUDA, kDLCPU
        let size = hfpatch::gemm_workspace(1, 1, outputs, inputs, device_type)?;
        let (mut out, mut scratch) = (self.zeros(outputs as usize), self.zeros(size as usize));
        let c = c.map(|c| c.view(0, &[1, outputs], None)).transpose()?;
        hfpatch::gemm(
            &mut out.view_mut(&[1, outputs])?,
            &mut scratch.view_mut(&[size])?,
            &x.view(0, &[1, inputs], None)?,
            &m.all()?,
            c.as_ref(),
            1.0,
            if c.is_some() { 1.0 } else { 0.0 },
            0,
            1,
            Stream::default(),
        )?;
        Ok(out)
    }
}

/// The numbers of `"key":[1,2]` in a piece of the header.
fn numbers(text: &str, key: &str) -> Result<Vec<i64>> {
    let start = text.find(&format!("\"{key}\":[")).ok_or(format!("the header lacks `{key}`"))?;
    let inside = &text[start + key.len() + 4..];
    let inside = &inside[..inside.find(']').ok_or("the header is cut off")?];
    Ok(inside.split(',').map(|n| n.trim().parse()).collect::<std::result::Result<_, _>>()?)
}

/// An fp32 tensor of a safetensors file: 8 bytes with the size of the header, the header as JSON,
/// the data.
fn tensor<'d>(file: &[u8], name: &str, place: Place<'d>) -> Result<Matrix<'d>> {
    let size = file.get(..8).ok_or("not a safetensors file")?;
    let size = usize::try_from(u64::from_le_bytes(size.try_into()?))?;
    let end = size.checked_add(8).ok_or("not a safetensors file")?;
    let header = std::str::from_utf8(file.get(8..end).ok_or("not a safetensors file")?)?;
    let start = header.find(&format!("\"{name}\":{{")).ok_or(format!("no tensor `{name}`"))?;
    let about = &header[start..];
    let about = &about[..about.find('}').ok_or("the header is cut off")?];
    if !about.contains("\"dtype\":\"F32\"") {
        return Err(format!("`{name}`: expected fp32").into());
    }
    let at = numbers(about, "data_offsets")?;
    let data = file[end..].get(at[0] as usize..at[1] as usize).ok_or("the file is cut off")?;
    let data = data.chunks_exact(4).map(|v| f32::from_le_bytes(v.try_into().unwrap())).collect();
    Ok(Matrix { data: Array::new(place.0, data), shape: numbers(about, "shape")? })
}

fn printed(name: &str, values: &[f32]) {
    let values: Vec<String> = values[..4].iter().map(|v| format!("{v:.4}")).collect();
    println!("{name:7} {}", values.join(" "));
}

fn run(file: &[u8], token: usize, place: Place) -> Result<()> {
    let load = |name| tensor(file, name, place);
    let (embed, norm, gate, up) = (load("embed")?, load("norm")?, load("gate")?, load("up")?);
    let (down, head) = (load("down")?, load("head")?);
    let stream = Stream::default();

    // A row of the embedding, copied by multiplying it by 1.
    let width = embed.shape[1] as usize;
    let mut x = place.zeros(width);
    let row = embed.data.view(token * width, &[width as i64], None)?;
    hfpatch::scale(&mut x.view_mut(&[width as i64])?, &row, 1.0, stream)?;

    let mut normed = place.zeros(width);
    hfpatch::rms_norm(
        &mut normed.view_mut(&norm.shape)?,
        &x.view(0, &norm.shape, None)?,
        Some(&norm.all()?),
        None,
        1e-6,
        0.0,
        hfpatch::CAST_INPUT,
        stream,
    )?;

    let (gated, upper) = (place.product(&gate, &normed, None)?, place.product(&up, &normed, None)?);
    let hidden = [gated.len() as i64];
    let mut inner = place.zeros(gated.len());
    hfpatch::gated(
        &mut inner.view_mut(&hidden)?,
        &gated.view(0, &hidden, None)?,
        &upper.view(0, &hidden, None)?,
        hfpatch::ACT_SILU,
        stream,
    )?;

    let mut y = place.product(&down, &inner, Some(&x))?;
    let mut logits = place.product(&head, &y, None)?;

    // Five rows with the same logits: the stride of the rows is 0.
    let seeds = Array::new(place.0, vec![0i64, 1, 2, 3, 4]);
    let mut tokens = Array::new(place.0, vec![0i64; 5]);
    hfpatch::sample(
        &mut tokens.view_mut(&[5])?,
        &logits.view(0, &[5, logits.len() as i64], Some(&[0, 1]))?,
        &seeds.view(0, &[5], None)?,
        None,
        None,
        None,
        None,
        None,
        0.8,
        10,
        0.95,
        0.0,
        stream,
    )?;

    printed("y", y.read());
    printed("logits", logits.read());
    let tokens: Vec<String> = tokens.read().iter().map(|t| t.to_string()).collect();
    println!("tokens  {}", tokens.join(" "));
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, token] = arguments.as_slice() else {
        return Err("usage: row FILE TOKEN".into());
    };
    let (file, token) = (std::fs::read(path)?, token.parse::<usize>()?);
    if token >= tensor(&file, "embed", Place(None))?.shape[0] as usize {
        return Err(format!("no such token: {token}").into());
    }
    println!("cpu");
    run(&file, token, Place(None))?;
    match Cuda::open() {
        Ok(cuda) => {
            println!("cuda:0");
            run(&file, token, Place(Some(&cuda)))?;
        }
        Err(why) => println!("cuda:0  not run: {why}"),
    }
    Ok(())
}
