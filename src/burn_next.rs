//! All differences between Burn 0.22.1, which `Cargo.toml` pins, and the next Burn, for which `.ci/next-burn` sets `cfg(burn_next)`.
//! Nothing else in this crate depends on the version. When the next Burn is released, one half of each pair goes.
#[cfg(feature = "system")]
pub use store::{StoreTensor, handed, packed};
#[cfg(feature = "system")]
mod store {
    use burn_store::burn_pack;

    /// A tensor on its way from a store to a module, through adapters.
    #[cfg(not(burn_next))]
    pub type StoreTensor = burn_pack::Tensor;
    #[cfg(burn_next)]
    pub use burn_store::StoreTensor;

    /// A tensor as an adapter takes it.
    #[allow(clippy::useless_conversion)] // with the next Burn it converts
    pub fn handed(tensor: burn_pack::Tensor) -> StoreTensor {
        tensor.into()
    }

    /// A tensor as a store or an adapter gives it, its bytes not read yet.
    #[cfg(not(burn_next))]
    pub fn packed(tensor: StoreTensor) -> burn_pack::Tensor {
        tensor
    }
    #[cfg(burn_next)]
    pub fn packed(tensor: StoreTensor) -> burn_pack::Tensor {
        tensor.into_pack()
    }
}

/// [`DryRun`]: while it lives, kernels are compiled and not launched. [`dry_run`]: whether one lives.
#[cfg(all(any(feature = "wgpu", feature = "cuda"), not(burn_next)))]
pub use burn::cubecl::dry_run::{DryRun, dry_run};
#[cfg(all(any(feature = "wgpu", feature = "cuda"), burn_next))]
pub use process_mode::{DryRun, dry_run};
#[cfg(all(any(feature = "wgpu", feature = "cuda"), burn_next))]
mod process_mode {
    use burn::cubecl::execution::{ProcessMode, ProcessModeOverride, StatisticsCollector};
    use std::sync::LazyLock;

    /// One collector for all, since overlapping modes must have the same.
    static COLLECTOR: LazyLock<StatisticsCollector> = LazyLock::new(StatisticsCollector::new);

    pub struct DryRun(#[allow(dead_code)] Option<ProcessModeOverride>); // until it is dropped

    impl DryRun {
        /// If the caller has set a mode, it stays, since another would panic.
        #[allow(clippy::new_without_default)] // a guard
        pub fn new() -> Self {
            let mode = || ProcessModeOverride::new(ProcessMode::CompileAndAutotune, &COLLECTOR);
            Self((!dry_run()).then(mode))
        }
    }

    pub fn dry_run() -> bool {
        ProcessMode::current() != ProcessMode::Execute
    }
}
