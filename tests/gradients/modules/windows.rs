//! What the tests of convolutions and pools share.
use super::*;

/// One axis of a convolution or a pool.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    pub kernel: usize,
    pub stride: usize,
    pub dilation: usize,
    /// Of [`Padding::Explicit`]; at most half of the kernel, so that no window of a pool is padding alone.
    pub padding: (usize, usize),
    /// Only of a transposed convolution.
    pub padding_out: usize,
    /// By how much the input is larger than a window.
    pub room: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Padding {
    Valid,
    Same,
    Explicit,
}

#[derive(Clone, Debug)]
pub struct Windows<const N: usize> {
    pub axes: [Axis; N],
    pub padding: Padding,
}

pub fn windows<const N: usize>() -> impl Strategy<Value = Windows<N>> {
    let axis = (1..5usize, 1..4usize, 1..3usize, [0..3usize, 0..3], 0..3usize, 0..4usize).prop_map(
        |(kernel, stride, dilation, padding, padding_out, room)| {
            let padding = padding.map(|padding| padding.min(kernel / 2)).into();
            Axis { kernel, stride, dilation, padding, padding_out, room }
        },
    );
    let padding = prop::sample::select(vec![Padding::Valid, Padding::Same, Padding::Explicit]);
    (prop::array::uniform::<_, N>(axis), padding).prop_map(|(axes, padding)| Windows { axes, padding })
}

impl Axis {
    /// The size of a window.
    pub fn extent(&self) -> usize {
        self.dilation * (self.kernel - 1) + 1
    }
}

impl<const N: usize> Windows<N> {
    pub fn each(&self, of: impl Fn(&Axis) -> usize) -> [usize; N] {
        self.axes.each_ref().map(of)
    }

    pub fn kernel(&self) -> [usize; N] {
        self.each(|axis| axis.kernel)
    }

    pub fn stride(&self) -> [usize; N] {
        self.each(|axis| axis.stride)
    }

    pub fn dilation(&self) -> [usize; N] {
        self.each(|axis| axis.dilation)
    }

    pub fn sizes(&self) -> [usize; N] {
        self.each(|axis| axis.extent() + axis.room)
    }

    /// With padding the same on both sides, for layers that have no other.
    pub fn symmetric(mut self) -> Self {
        for axis in &mut self.axes {
            axis.padding.1 = axis.padding.0;
            if self.padding == Padding::Same {
                (axis.kernel, axis.stride) = (axis.kernel | 1, 1);
            }
        }
        self
    }

    /// The output of a convolution with symmetric padding.
    pub fn outputs(&self) -> [usize; N] {
        self.each(|axis| {
            let padding = match self.padding {
                Padding::Valid => 0,
                Padding::Same => axis.kernel / 2,
                Padding::Explicit => axis.padding.0,
            };
            (axis.room + 2 * padding) / axis.stride + 1
        })
    }
}

impl Windows<1> {
    pub fn padding(&self) -> PaddingConfig1d {
        let [(left, right)] = self.axes.map(|axis| axis.padding);
        match self.padding {
            Padding::Valid => PaddingConfig1d::Valid,
            Padding::Same => PaddingConfig1d::Same,
            Padding::Explicit => PaddingConfig1d::Explicit(left, right),
        }
    }
}

impl Windows<2> {
    pub fn padding(&self) -> PaddingConfig2d {
        let [(top, bottom), (left, right)] = self.axes.map(|axis| axis.padding);
        match self.padding {
            Padding::Valid => PaddingConfig2d::Valid,
            Padding::Same => PaddingConfig2d::Same,
            Padding::Explicit => PaddingConfig2d::Explicit(top, left, bottom, right),
        }
    }
}

impl Windows<3> {
    pub fn padding(&self) -> PaddingConfig3d {
        let [(depth, _), (height, _), (width, _)] = self.axes.map(|axis| axis.padding);
        match self.padding {
            Padding::Valid => PaddingConfig3d::Valid,
            Padding::Same => PaddingConfig3d::Same,
            Padding::Explicit => PaddingConfig3d::Explicit(depth, height, width),
        }
    }
}
