//! A kernel and a cuBLAS call on buffers from an allocator that a configuration string selects.
//!
//! ```sh
//! ALLOC_CONF=backend:native,expandable_segments:True \
//!     cargo run --release --example cudarc --features cuda-dynamic
//! ```

#![expect(unsafe_code, reason = "kernels and cuBLAS trust their arguments")]

use std::error::Error;
use std::sync::Arc;

use cudarc::cublas::sys::{cublasOperation_t::CUBLAS_OP_N, is_culib_present};
use cudarc::cublas::{CudaBlas, Gemm, GemmConfig};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use stratalloc::allocator::DeviceAllocator;
use stratalloc::driver::Cuda;
use stratalloc::error::DriverErrorKind;
use stratalloc::handle::DeviceVec;
use stratalloc::ids::DeviceId;

/// The kernel y[i] += a * x[i], as PTX so that no compiler is needed.
const SAXPY: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry saxpy(.param .u64 y, .param .u64 x, .param .f32 a, .param .u64 n) {
    .reg .pred %p;
    .reg .f32 %f<4>;
    .reg .b32 %r<4>;
    .reg .b64 %d<8>;
    ld.param.u64 %d1, [y];
    ld.param.u64 %d2, [x];
    ld.param.f32 %f1, [a];
    ld.param.u64 %d3, [n];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.wide.u32 %d4, %r1, %r2, 0;
    cvt.u64.u32 %d5, %r3;
    add.u64 %d4, %d4, %d5;
    setp.ge.u64 %p, %d4, %d3;
    @%p bra done;
    shl.b64 %d4, %d4, 2;
    add.u64 %d1, %d1, %d4;
    add.u64 %d2, %d2, %d4;
    ld.global.f32 %f2, [%d2];
    ld.global.f32 %f3, [%d1];
    fma.rn.f32 %f3, %f1, %f2, %f3;
    st.global.f32 [%d1], %f3;
done:
    ret;
}
";

const N: usize = 512;

fn main() -> Result<(), Box<dyn Error>> {
    // Opens the device through this library first, because without a device cudarc would panic instead
    // of returning an error.
    let cuda = match Cuda::open(DeviceId(0)) {
        Ok(cuda) => Arc::new(cuda),
        Err(error) if error.kind() == DriverErrorKind::NotSupported => {
            println!("skipped: no CUDA device ({error})");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    // SAFETY: this loads NVIDIA's library, whose initialisers are safe to run in any process.
    if !unsafe { is_culib_present() } {
        return Err(
            "this example needs cuBLAS: put libcublas.so on the loader's search path".into()
        );
    }
    let handle = stratalloc::from_environment(cuda)?;
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let kernel = context.load_module(Ptx::from_src(SAXPY))?.load_function("saxpy")?;

    let x: Vec<f32> = (0..N * N).map(|i| (i % 7) as f32).collect();
    let x = handle.cuda_from_slice(&x, &stream)?;
    let mut y = handle.cuda_zeroed::<f32>(N * N, &stream)?;
    let (a, count) = (2f32, (N * N) as u64);
    let mut launch = stream.launch_builder(&kernel);
    launch.arg(&mut y).arg(&x).arg(&a).arg(&count);
    // SAFETY: the arguments have the types of the kernel's parameters, and the kernel accesses only the
    // first `count` elements.
    unsafe { launch.launch(LaunchConfig::for_num_elems(u32::try_from(count)?))? };

    // z = y * ones: each value of a column of z is the sum of a row of y.
    let ones = handle.cuda_from_slice(&vec![1f32; N * N], &stream)?;
    let mut z = handle.cuda_zeroed::<f32>(N * N, &stream)?;
    let n = i32::try_from(N)?;
    let gemm = GemmConfig {
        transa: CUBLAS_OP_N,
        transb: CUBLAS_OP_N,
        m: n,
        n,
        k: n,
        alpha: 1f32,
        lda: n,
        ldb: n,
        beta: 0f32,
        ldc: n,
    };
    // SAFETY: the three matrices have n * n values each.
    unsafe { CudaBlas::new(Arc::clone(&stream))?.gemm(gemm, &ones, &y, &mut z)? };

    // Converts to a plain buffer, which works whichever library wrote the data.
    let z = DeviceVec::from_cuda(&handle, z)?.to_vec()?;
    let row: f32 = (0..N).map(|i| 2.0 * (i % 7) as f32).sum();
    assert!((z[0] - row).abs() < 1e-3, "{} is not {row}", z[0]);
    drop((x, y, ones));
    let statistics =
        handle.control().counters.ok_or("every built-in strategy counts")?.statistics();
    println!(
        "saxpy and gemm agree on backend:{}: {row}; {} bytes live, {} at the peak, {} reserved",
        handle.name(),
        statistics.memory_allocated(),
        statistics.max_memory_allocated(),
        statistics.memory_reserved()
    );
    Ok(())
}
