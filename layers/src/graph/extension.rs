//! The [`extension`] macro: each operation is called through one method of an extension trait of Burn's backends.

/// Declares an extension trait, whose calls Burn routes to the backend of the tensors. One body implements it both for the plain
/// backends and for `Autodiff` over backends with the given kernels. In the body, [`Self::run`](super::run::Run::run) runs an operation,
/// and records it if need be. [`Self::plain`](super::run::Run::plain) unwraps an input that no gradient flows to.
macro_rules! extension {
    (
        $(#[$docs:meta])*
        pub trait $ops:ident($kernels:ident) {
            $(
                $(#[$method_docs:meta])*
                fn $method:ident(
                    $($(#[$attribute:meta])* $argument:ident: $type:ident $(<$parameter:tt>)?),* $(,)?
                ) -> $output:ident $(<$output_parameter:tt>)? $body:block
            )+
        }
    ) => {
        $crate::burn_next::routed! {
            [Autodiff]
            $(#[$docs])*
            pub trait $ops: burn::backend::Backend {
                $(
                    $(#[$method_docs])*
                    fn $method($($(#[$attribute])* $argument: $type $(<$parameter>)?),*) -> $output $(<$output_parameter>)?;
                )+
            }
        }

        $crate::backend::plain_backends!($ops {
            $(fn $method($($argument: $type $(<$parameter>)?),*) -> $output $(<$output_parameter>)? $body)+
        });

        impl<B, C> $ops for burn::backend::autodiff::Autodiff<B, C>
        where
            B: $kernels + $crate::saved::packing::PackingKernels,
            C: burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy,
        {
            $(fn $method($($argument: $type $(<$parameter>)?),*) -> $output $(<$output_parameter>)? $body)+
        }
    };
}
pub(crate) use extension;
