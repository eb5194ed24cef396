//! Where libhfpatch comes from, the first of these that is there:
//!
//! 1. with the feature `stub`: the stub
//! 2. `HFPATCH_DIR`: a folder that `hfpatch clib` wrote
//! 3. pkg-config
//! 4. the sources in `HFPATCH_SOURCE`, or those that this crate lies beside: its CPU kernels are
//!    compiled with `CXX`
//! 5. the stub, with a warning
//!
//! Nothing but the standard library is used.
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;

fn main() {
    for name in ["HFPATCH_DIR", "HFPATCH_SOURCE", "CXX", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let source = source();
    if env::var_os("CARGO_FEATURE_STUB").is_some() {
        return stub(&source.expect("the stub is compiled from the sources: set HFPATCH_SOURCE"));
    }
    if let Some(prefix) = env::var_os("HFPATCH_DIR").map(PathBuf::from) {
        return installed(&prefix);
    }
    if pkg_config() {
        return;
    }
    let source = source.expect(
        "libhfpatch was not found; set HFPATCH_DIR to the folder that `hfpatch clib` wrote, or \
         HFPATCH_SOURCE to the sources of hfpatch",
    );
    if let Err(why) = kernels(&source) {
        println!("cargo:warning=libhfpatch was not built, its stub is linked: {why}");
        stub(&source);
    }
}

/// The folder of `kernel_src` and `clib`.
fn source() -> Option<PathBuf> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap());
    let found = match env::var_os("HFPATCH_SOURCE") {
        Some(given) => PathBuf::from(given),
        None => here.join("../../.."),
    };
    found.join("kernel_src/hfpatch.h").is_file().then_some(found)
}

fn installed(prefix: &Path) {
    let lib = prefix.join("lib");
    let shared = lib.join("libhfpatch.so").exists();
    if !shared && !lib.join("libhfpatch.a").exists() {
        panic!(
            "`HFPATCH_DIR`: expected a folder with lib/libhfpatch.so or lib/libhfpatch.a, got `{}`",
            prefix.display()
        );
    }
    println!("cargo:rustc-link-search=native={}", lib.display());
    if shared {
        println!("cargo:rustc-link-lib=dylib=hfpatch");
    } else {
        println!("cargo:rustc-link-lib=static=hfpatch");
        runtimes();
        let pc = std::fs::read_to_string(lib.join("pkgconfig/hfpatch.pc")).unwrap_or_default();
        let private = pc.lines().find_map(|l| l.strip_prefix("Libs.private:"));
        link_flags(private.unwrap_or_default());
    }
}

fn link_flags(flags: &str) {
    for flag in flags.split_whitespace() {
        if let Some(folder) = flag.strip_prefix("-L") {
            println!("cargo:rustc-link-search=native={folder}");
        } else if let Some(name) = flag.strip_prefix("-l") {
            println!("cargo:rustc-link-lib={name}");
        }
    }
}

fn pkg_config() -> bool {
    let Ok(done) = Command::new("pkg-config").args(["--libs", "hfpatch"]).output() else {
        return false;
    };
    if done.status.success() {
        link_flags(&String::from_utf8_lossy(&done.stdout));
    }
    done.status.success()
}

fn compiler() -> String {
    env::var("CXX").unwrap_or_else(|_| "c++".into())
}

fn run(command: &mut Command) -> Result<(), String> {
    let done = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if done.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&done.stderr).replace('\n', " ")))
}

/// Compiles sources, several at once, and links them as one static library.
fn compile(source: &Path, files: Vec<PathBuf>, flags: &[&str]) -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    let jobs: usize = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let object = |file: &Path| {
        let name = file.strip_prefix(source).unwrap_or(file).to_string_lossy().replace('/', "-");
        out.join(name + ".o")
    };
    let queue = Mutex::new(files.clone());
    let failed = Mutex::new(None);
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| loop {
                let Some(file) = queue.lock().unwrap().pop() else { break };
                let mut command = Command::new(compiler());
                command.args(["-O3", "-fPIC", "-fvisibility=hidden", "-x", "c++", "-std=c++17"]);
                command.args(flags).arg("-I").arg(source.join("kernel_src"));
                command.arg("-c").arg(&file).arg("-o").arg(object(&file));
                if let Err(why) = run(&mut command) {
                    *failed.lock().unwrap() = Some(why);
                    queue.lock().unwrap().clear();
                }
            });
        }
    });
    if let Some(why) = failed.into_inner().unwrap() {
        return Err(why);
    }
    let library = out.join("libhfpatch.a");
    let _ = std::fs::remove_file(&library);
    run(Command::new("ar").arg("rcs").arg(&library).args(files.iter().map(|f| object(f))))?;
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=hfpatch");
    Ok(())
}

fn kernels(source: &Path) -> Result<(), String> {
    println!("cargo:rerun-if-changed={}", source.join("kernel_src").display());
    let mut files = Vec::new();
    for folder in ["kernel_src", "kernel_src/cpu"] {
        let found = std::fs::read_dir(source.join(folder)).map_err(|e| e.to_string())?;
        let found = found.filter_map(|entry| entry.ok().map(|e| e.path()));
        files.extend(found.filter(|p| p.extension().is_some_and(|e| e == "cpp")));
    }
    files.sort();
    compile(source, files, &["-fopenmp", "-DCPU_KERNEL"])?;
    runtimes();
    Ok(())
}

/// Those of C++ and OpenMP, which a static library leaves to the program.
fn runtimes() {
    println!("cargo:rustc-link-lib=dylib=stdc++");
    println!("cargo:rustc-link-lib=dylib=gomp");
}

fn stub(source: &Path) {
    let file = source.join("clib/stub.c");
    println!("cargo:rerun-if-changed={}", file.display());
    if let Err(why) = compile(source, vec![file], &[]) {
        panic!("the stub of libhfpatch was not built: {why}");
    }
}
