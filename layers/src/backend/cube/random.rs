//! Random numbers that depend only on a seed and a position: drawn again, in whatever order, they are the same.
//!
//! They are those of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011), which gives
//! four numbers for a key of two words and a counter.
use super::math::constant;
use burn_cubecl::cubecl::{self, prelude::*, std::tensor::layout::linear::LinearView};

/// Elements of a group, each of which has one of the four numbers of a counter.
pub(crate) const GROUP: usize = 4;

/// Elements of a seed, which are numbers of 16 bits.
pub(crate) const SEED_WORDS: usize = 4;

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Numbers are below it with this probability, which is neither 0 nor 1.
pub(crate) fn threshold(probability: f64) -> u32 {
    // The conversion saturates.
    (probability * 2f64.powi(32)).round() as u32
}

/// 32 bits for a position, the same as those of [`packing::noise`](crate::saved::packing::noise).
#[cube]
pub(crate) fn noise(position: u32, seed: u32) -> u32 {
    let mixed = position ^ (seed * 0x9E37_79B9u32);
    let first = (mixed ^ (mixed >> 16u32)) * 0x7FEB_352Du32;
    let second = (first ^ (first >> 15u32)) * 0x846C_A68Bu32;
    second ^ (second >> 16u32)
}

/// One number for each element of a group.
#[derive(CubeType)]
pub(crate) struct Numbers {
    first: u32,
    second: u32,
    third: u32,
    fourth: u32,
}

#[cube]
impl Numbers {
    /// The number of an element of the group.
    pub fn get(&self, #[comptime] element: usize) -> u32 {
        match comptime!(element) {
            0 => self.first,
            1 => self.second,
            2 => self.third,
            _ => self.fourth,
        }
    }
}

/// The numbers of a group.
#[cube]
pub(crate) fn numbers(seed: &LinearView<'_, u32>, group: usize) -> Numbers {
    let mut key0 = seed.read(0usize) | (seed.read(1usize) << 16);
    let mut key1 = seed.read(2usize) | (seed.read(3usize) << 16);
    let mut c0 = u32::cast_from(group);
    let mut c1 = 0u32;
    let mut c2 = 0u32;
    let mut c3 = 0u32;
    #[unroll]
    for _ in 0..ROUNDS {
        let high0 = u32::mul_hi(c0, MULTIPLIERS[0]);
        let low0 = c0 * MULTIPLIERS[0];
        let high1 = u32::mul_hi(c2, MULTIPLIERS[1]);
        let low1 = c2 * MULTIPLIERS[1];
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += WEYL[0];
        key1 += WEYL[1];
    }
    Numbers { first: c0, second: c1, third: c2, fourth: c3 }
}

/// A number in `0..1`, uniform.
#[cube]
pub(crate) fn unit<W: Float>(number: u32) -> W {
    // As many bits as an f32 has.
    W::cast_from(number >> 8u32) * constant::<W>(comptime!(1.0 / (1 << 24) as f32))
}
