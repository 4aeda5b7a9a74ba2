//! Convolutions.

mod conv1d;
mod conv2d;
mod conv3d;
mod conv_transpose1d;
mod conv_transpose2d;
mod conv_transpose3d;
mod deform_conv2d;

pub use conv_transpose1d::{
    ConvTranspose1dConfig, MemSaveConvTranspose1d, MemSaveConvTranspose1d as ConvTranspose1d,
};
pub use conv_transpose2d::{
    ConvTranspose2dConfig, MemSaveConvTranspose2d, MemSaveConvTranspose2d as ConvTranspose2d,
};
pub use conv_transpose3d::{
    ConvTranspose3dConfig, MemSaveConvTranspose3d, MemSaveConvTranspose3d as ConvTranspose3d,
};
pub use conv1d::{Conv1dConfig, MemSaveConv1d, MemSaveConv1d as Conv1d};
pub use conv2d::{Conv2dConfig, MemSaveConv2d, MemSaveConv2d as Conv2d};
pub use conv3d::{Conv3dConfig, MemSaveConv3d, MemSaveConv3d as Conv3d};
pub use deform_conv2d::{DeformConv2dConfig, MemSaveDeformConv2d, MemSaveDeformConv2d as DeformConv2d};
