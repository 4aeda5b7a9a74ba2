//! Convolution layers: ordinary, transposed and deformable.

mod conv1d;
mod conv2d;
mod conv3d;
mod conv_transpose1d;
mod conv_transpose2d;
mod conv_transpose3d;
mod deform_conv2d;
mod norm_relu;

pub use conv_transpose1d::*;
pub use conv_transpose2d::*;
pub use conv_transpose3d::*;
pub use conv1d::*;
pub use conv2d::*;
pub use conv3d::*;
pub use deform_conv2d::*;
