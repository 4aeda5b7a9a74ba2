//! The blocks of `ggml`: integers of a few bits, and what they are scaled by.
use half::f16;

/// The number in half precision at this byte.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The bits of a byte from `shift` on, as many as `mask` has, as an integer that is as wide as a float.
#[inline(always)]
fn integer(byte: u8, shift: usize, mask: u8) -> i32 {
    (i32::from(byte) >> shift) & i32::from(mask)
}

/// The same bits as a byte.
#[inline(always)]
fn bits(byte: u8, shift: usize, mask: u8) -> u8 {
    (byte >> shift) & mask
}

#[inline(always)]
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for at in 0..16 {
        let byte = block[2 + at];
        out[at] = (integer(byte, 0, 15) - 8) as f32 * scale;
        out[16 + at] = (integer(byte, 4, 15) - 8) as f32 * scale;
    }
}

#[inline(always)]
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for at in 0..16 {
        let byte = block[4 + at];
        out[at] = integer(byte, 0, 15) as f32 * scale + minimum;
        out[16 + at] = integer(byte, 4, 15) as f32 * scale + minimum;
    }
}

/// The fifth bits of elements `at` and `16 + at`, of the four bytes that have one for each.
#[inline(always)]
fn fifth_bits(high: u32, at: usize) -> [i32; 2] {
    [((high >> at) & 1) as i32 * 16, ((high >> (16 + at)) & 1) as i32 * 16]
}

#[inline(always)]
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for at in 0..16 {
        let (byte, [first, second]) = (block[6 + at], fifth_bits(high, at));
        out[at] = (integer(byte, 0, 15) + first - 16) as f32 * scale;
        out[16 + at] = (integer(byte, 4, 15) + second - 16) as f32 * scale;
    }
}

#[inline(always)]
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for at in 0..16 {
        let (byte, [first, second]) = (block[8 + at], fifth_bits(high, at));
        out[at] = (integer(byte, 0, 15) + first) as f32 * scale + minimum;
        out[16 + at] = (integer(byte, 4, 15) + second) as f32 * scale + minimum;
    }
}

#[inline(always)]
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for at in 0..32 {
        out[at] = f32::from(block[2 + at].cast_signed()) * scale;
    }
}

/// 256 elements `scale integer - minimum`. Each of `RUNS` runs of elements, of equal length, has its own scale and, if `MINIMA`, its own
/// minimum. Integers of eight bits take a fraction of the vectors that wider ones take.
struct Runs<const RUNS: usize, const MINIMA: bool> {
    integers: [i8; 256],
    scales: [f32; RUNS],
    minima: [f32; RUNS],
}

impl<const RUNS: usize, const MINIMA: bool> Runs<RUNS, MINIMA> {
    /// Writes the elements.
    #[inline(always)]
    fn unpack(self, out: &mut [f32; 256]) {
        let length = 256 / RUNS;
        for run in 0..RUNS {
            for at in 0..length {
                let scaled = self.scales[run] * f32::from(self.integers[run * length + at]);
                out[run * length + at] = if MINIMA { scaled - self.minima[run] } else { scaled };
            }
        }
    }
}

/// Two bits per element: 16 scales and minima of four bits each, the bits, and the scales of both.
#[inline(always)]
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scale, minimum) = (half_at(block, 80), half_at(block, 82));
    let mut integers = [0; 256];
    // 128 elements have 32 bytes; 32 of them the same two bits of each.
    for part in 0..8 {
        let bytes = block[16 + part / 4 * 32..][..32].iter();
        for (integer, byte) in integers[part * 32..][..32].iter_mut().zip(bytes) {
            *integer = bits(*byte, part % 4 * 2, 3).cast_signed();
        }
    }
    let of_runs =
        |shift: usize, scale: f32| std::array::from_fn(|run| scale * f32::from(bits(block[run], shift, 15)));
    let runs: Runs<16, true> = Runs { integers, scales: of_runs(0, scale), minima: of_runs(4, minimum) };
    runs.unpack(out);
}

/// Three bits per element: the third bits, then the others, 16 signed scales of six bits each, and their scale.
#[inline(always)]
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let scale = half_at(block, 108);
    let mut integers = [0; 256];
    for part in 0..8 {
        let bytes = block[32 + part / 4 * 32..][..32].iter().zip(&block[..32]);
        for (integer, (low, high)) in integers[part * 32..][..32].iter_mut().zip(bytes) {
            *integer = (bits(*low, part % 4 * 2, 3) + 4 * bits(*high, part, 1)).cast_signed() - 4;
        }
    }
    let scales = std::array::from_fn(|run| {
        let low = bits(block[96 + run % 8], run / 8 * 4, 15);
        let high = bits(block[104 + run % 4], run / 4 * 2, 3);
        scale * f32::from((low + 16 * high).cast_signed() - 32)
    });
    Runs::<16, false> { integers, scales, minima: [0.0; 16] }.unpack(out);
}

/// The eight scales and the eight minima of six bits each in twelve bytes, times those of the block.
#[inline(always)]
fn scales_and_minima(bytes: &[u8], scale: f32, minimum: f32) -> [[f32; 8]; 2] {
    let (mut scales, mut minima) = ([0; 8], [0; 8]);
    for run in 0..4 {
        let [of_scale, of_minimum, low] = [bytes[run], bytes[run + 4], bytes[run + 8]];
        scales[run] = of_scale & 63;
        minima[run] = of_minimum & 63;
        scales[run + 4] = low & 15 | of_scale >> 6 << 4;
        minima[run + 4] = low >> 4 | of_minimum >> 6 << 4;
    }
    [scales.map(|integer| scale * f32::from(integer)), minima.map(|integer| minimum * f32::from(integer))]
}

/// Four bits per element: the scales of scales and minima, both, and the bits.
#[inline(always)]
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let [scales, minima] = scales_and_minima(&block[4..16], half_at(block, 0), half_at(block, 2));
    let mut integers = [0; 256];
    for part in 0..4 {
        let bytes = &block[16 + part * 32..][..32];
        let integers = &mut integers[part * 64..][..64];
        for at in 0..32 {
            integers[at] = (bytes[at] & 15).cast_signed();
        }
        for at in 0..32 {
            integers[32 + at] = (bytes[at] >> 4).cast_signed();
        }
    }
    Runs::<8, true> { integers, scales, minima }.unpack(out);
}

/// Five bits per element: as [`q4_k`], with the fifth bits before the others.
#[inline(always)]
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let [scales, minima] = scales_and_minima(&block[4..16], half_at(block, 0), half_at(block, 2));
    let mut integers = [0; 256];
    for part in 0..8 {
        let bytes = block[48 + part / 2 * 32..][..32].iter().zip(&block[16..48]);
        for (integer, (low, high)) in integers[part * 32..][..32].iter_mut().zip(bytes) {
            *integer = (bits(*low, part % 2 * 4, 15) + 16 * bits(*high, part, 1)).cast_signed();
        }
    }
    Runs::<8, true> { integers, scales, minima }.unpack(out);
}

/// Six bits per element: the lower four, the upper two, 16 signed scales, and their scale.
#[inline(always)]
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = half_at(block, 208);
    let mut integers = [0; 256];
    for part in 0..8 {
        // Of 128 elements, 64 have the lower halves of 64 bytes, and 32 the same two bits of 32 bytes.
        let (of_half, half) = (part % 4, part / 4);
        let low = block[half * 64 + of_half % 2 * 32..][..32].iter();
        let high = block[128 + half * 32..][..32].iter();
        for (integer, (low, high)) in integers[part * 32..][..32].iter_mut().zip(low.zip(high)) {
            let unsigned = bits(*low, of_half / 2 * 4, 15) + 16 * bits(*high, of_half * 2, 3);
            *integer = unsigned.cast_signed() - 32;
        }
    }
    let scales = std::array::from_fn(|run| scale * f32::from(block[192 + run].cast_signed()));
    Runs::<16, false> { integers, scales, minima: [0.0; 16] }.unpack(out);
}

/// The integers of `IQ4_NL` and `IQ4_XS`, denser around zero.
const NON_LINEAR: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// The integers of 16 bytes: those of the lower halves, then those of the upper ones.
#[inline(always)]
fn non_linear(bytes: &[u8], out: &mut [f32; 32]) {
    for (at, byte) in bytes[..16].iter().enumerate() {
        out[at] = NON_LINEAR[usize::from(byte & 15)];
        out[16 + at] = NON_LINEAR[usize::from(byte >> 4)];
    }
}

#[inline(always)]
pub(super) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    non_linear(&block[2..], out);
    for out in out {
        *out *= scale;
    }
}

/// As [`iq4_nl`], with eight signed scales of six bits: their scale, the upper two bits, the lower four, and the indices.
#[inline(always)]
pub(super) fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let scale = half_at(block, 0);
    for (part, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = integer(block[4 + part / 2], part % 2 * 4, 15);
        let high = integer(block[2 + part / 4], part % 4 * 2, 3);
        let scale = scale * (low + 16 * high - 32) as f32;
        non_linear(&block[8 + part * 16..], out);
        for out in out {
            *out *= scale;
        }
    }
}
