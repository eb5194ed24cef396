//! One row of a tiny language model with libhfpatch: the token's embedding, an RMSNorm, a gated MLP
//! with a residual, the logits, and five tokens drawn from them.
//!
//!     cargo run -- ../row.safetensors 7
//!
//! It prints what examples/row_pytorch.py prints. The products of matrices and the row are loops here.
use hfpatch::{Stream, TensorView, TensorViewMut};
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Matrix {
    data: Vec<f32>,
    shape: Vec<usize>,
}

impl Matrix {
    fn product(&self, x: &[f32]) -> Vec<f32> {
        let rows = self.data.chunks_exact(self.shape[1]);
        rows.map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    }
}

/// The numbers of `"key":[1,2]` in a piece of the header.
fn numbers(text: &str, key: &str) -> Result<Vec<usize>> {
    let start = text.find(&format!("\"{key}\":[")).ok_or(format!("the header lacks `{key}`"))?;
    let inside = &text[start + key.len() + 4..];
    let inside = &inside[..inside.find(']').ok_or("the header is cut off")?];
    Ok(inside.split(',').map(|n| n.trim().parse()).collect::<std::result::Result<_, _>>()?)
}

/// An fp32 tensor of a safetensors file: 8 bytes with the size of the header, the header as JSON,
/// the data.
fn tensor(file: &[u8], name: &str) -> Result<Matrix> {
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
    let data = file[end..].get(at[0]..at[1]).ok_or("the file is cut off")?;
    let data = data.chunks_exact(4).map(|v| f32::from_le_bytes(v.try_into().unwrap())).collect();
    Ok(Matrix { data, shape: numbers(about, "shape")? })
}

fn printed(name: &str, values: &[f32]) {
    let values: Vec<String> = values[..4].iter().map(|v| format!("{v:.4}")).collect();
    println!("{name:7} {}", values.join(" "));
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, token] = arguments.as_slice() else {
        return Err("usage: row FILE TOKEN".into());
    };
    let file = std::fs::read(path)?;
    let load = |name| tensor(&file, name);
    let (embed, norm, gate, up) = (load("embed")?, load("norm")?, load("gate")?, load("up")?);
    let (down, head) = (load("down")?, load("head")?);
    let token: usize = token.parse()?;
    let stream = Stream::default();

    let x = embed.data.chunks_exact(embed.shape[1]).nth(token).ok_or("no such token")?;
    let width = [x.len() as i64];
    let mut normed = vec![0f32; x.len()];
    hfpatch::rms_norm(
        &mut TensorViewMut::new(&mut normed, &width)?,
        &TensorView::new(x, &width)?,
        Some(&TensorView::new(&norm.data, &width)?),
        None,
        1e-6,
        0.0,
        hfpatch::CAST_INPUT,
        stream,
    )?;

    let (gated, upper) = (gate.product(&normed), up.product(&normed));
    let hidden = [gated.len() as i64];
    let mut inner = vec![0f32; gated.len()];
    hfpatch::gated(
        &mut TensorViewMut::new(&mut inner, &hidden)?,
        &TensorView::new(&gated, &hidden)?,
        &TensorView::new(&upper, &hidden)?,
        hfpatch::ACT_SILU,
        stream,
    )?;

    let y: Vec<f32> = down.product(&inner).iter().zip(x).map(|(a, b)| a + b).collect();
    let logits = head.product(&y);

    // Five rows with the same logits: the stride of the rows is 0.
    let seeds = [0i64, 1, 2, 3, 4];
    let mut tokens = [0i64; 5];
    hfpatch::sample(
        &mut TensorViewMut::new(&mut tokens, &[5])?,
        &TensorView::strided(&logits, &[5, logits.len() as i64], &[0, 1])?,
        &TensorView::new(&seeds, &[5])?,
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

    printed("y", &y);
    printed("logits", &logits);
    println!("tokens  {}", tokens.map(|t| t.to_string()).join(" "));
    Ok(())
}
