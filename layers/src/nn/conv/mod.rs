//! Convolutions.

mod conv1d;
mod conv2d;
mod conv3d;
mod conv_transpose1d;
mod conv_transpose2d;
mod conv_transpose3d;
mod deform_conv2d;

pub use conv_transpose1d::{
    ConvTranspose1d, ConvTranspose1d as MemSaveConvTranspose1d, ConvTranspose1dConfig,
};
pub use conv_transpose2d::{
    ConvTranspose2d, ConvTranspose2d as MemSaveConvTranspose2d, ConvTranspose2dConfig,
};
pub use conv_transpose3d::{
    ConvTranspose3d, ConvTranspose3d as MemSaveConvTranspose3d, ConvTranspose3dConfig,
};
pub use conv1d::{Conv1d, Conv1d as MemSaveConv1d, Conv1dConfig};
pub use conv2d::{Conv2d, Conv2d as MemSaveConv2d, Conv2dConfig};
pub use conv3d::{Conv3d, Conv3d as MemSaveConv3d, Conv3dConfig};
pub use deform_conv2d::{DeformConv2d, DeformConv2d as MemSaveDeformConv2d, DeformConv2dConfig};
