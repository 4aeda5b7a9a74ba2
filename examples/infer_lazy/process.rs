//! What the examples of lazy weights share: a file of random weights, and processes with limited memory.
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bytes, DType, Tensor};
use burn_memsave::measure::{ResidentMemory, mib};
use burn_store::burn_pack;
use indicatif::{ProgressBar, ProgressStyle};
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The most memory that this process has had in RAM so far, above that of the `idle` process, if the system reports it.
pub fn peak_above(idle: Option<ResidentMemory>) -> Option<u64> {
    Some(ResidentMemory::of_process()?.peak.saturating_sub(idle?.live))
}

/// Bytes in MiB, or "unknown".
#[allow(dead_code)] // the paper has other tables
pub fn mib_or_unknown(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unknown".into(), mib)
}

/// Whether the address space of a process can be limited. Only Linux has `ulimit -v`.
pub const CAN_LIMIT: bool = cfg!(target_os = "linux");

/// The command that starts this program again, with at most `limit` bytes of address space.
///
/// # Errors
///
/// If the system [cannot](CAN_LIMIT) limit it.
pub fn again(limit: Option<u64>) -> Result<Command, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let Some(bytes) = limit else { return Ok(Command::new(program)) };
    if !CAN_LIMIT {
        return Err("only Linux limits the address space of a process".into());
    }
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit -v {} && exec \"$0\" \"$@\"", bytes >> 10)).arg(program);
    Ok(shell)
}

/// Writes random weights for a module that was just initialized, one tensor after the other, so that neither is ever in memory.
pub fn write_random_weights(module: &impl Module, path: &Path) -> Result<(), Box<dyn Error>> {
    #[derive(Default)]
    struct Tensors {
        path: Vec<String>,
        tensors: Vec<burn_pack::Tensor>,
        bytes: u64,
    }
    impl ModuleVisitor for Tensors {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let (name, shape) = (self.path.join("."), param.lazy_shape());
            let (count, seed, gamma) =
                (shape.num_elements(), self.tensors.len() as u64, name.ends_with("gamma"));
            let data = move || {
                let random = |index: u64| {
                    let mixed = (index ^ (seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    (mixed >> 40) as f32 / (1 << 24) as f32 * 0.06 - 0.03 + f32::from(u8::from(gamma))
                };
                Ok(Bytes::from_elems((0..count as u64).map(random).collect::<Vec<f32>>()))
            };
            self.bytes += 4 * count as u64;
            self.tensors.push(burn_pack::Tensor::deferred(name, DType::F32, shape, None, 4 * count, data));
        }
    }
    let mut tensors = Tensors::default();
    module.visit(&mut tensors);
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}")?);
    bar.set_message(format!("writing {} MiB of random weights to {}", mib(tensors.bytes), path.display()));
    bar.enable_steady_tick(Duration::from_millis(200));
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    burn_pack::Writer::new(tensors.tensors).write_to_file(path)?;
    bar.finish_and_clear();
    Ok(())
}
