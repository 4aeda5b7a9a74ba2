//! Images of real handwritten digits, 8x8 pixels each.
use burn::tensor::{Device, Int, Tensor, TensorData};
use flate2::read::GzDecoder;
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use std::error::Error;

/// The notice beside the data file says where the digits come from.
const DIGITS: &[u8] = include_bytes!("../data/digits.csv.gz");

/// An image, and which digit it shows.
#[derive(Clone)]
pub struct Digit {
    pixels: [f32; 64],
    pub label: i64,
}

/// A batch of images `[batch, 1, 8, 8]` and their labels `[batch]`.
pub type Batch = (Tensor<4>, Tensor<1, Int>);

/// Loads the training set and the test set. Every fifth digit is for testing.
pub fn load() -> Result<(Vec<Digit>, Vec<Digit>), Box<dyn Error>> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).from_reader(GzDecoder::new(DIGITS));
    let mut digits = Vec::new();
    for row in reader.deserialize() {
        let row: Vec<f32> = row?;
        let (&label, pixels) = row.split_last().ok_or("digits.csv: an empty row")?;
        let pixels: [f32; 64] = pixels.try_into().map_err(|_| "digits.csv: a row without 64 pixels")?;
        digits.push(Digit { pixels: pixels.map(|pixel| pixel / 8.0 - 1.0), label: label as i64 });
    }
    let (test, train): (Vec<_>, Vec<_>) = digits.into_iter().enumerate().partition(|(row, _)| row % 5 == 0);
    let strip = |digits: Vec<(usize, Digit)>| digits.into_iter().map(|(_, digit)| digit).collect();
    Ok((strip(train), strip(test)))
}

/// The digits in an order that depends on the seed only.
pub fn shuffled(digits: &[Digit], seed: u64) -> Vec<Digit> {
    let mut digits = digits.to_vec();
    digits.shuffle(&mut StdRng::seed_from_u64(seed));
    digits
}

/// The digits as tensors.
pub fn batch(digits: &[Digit], device: &Device) -> Batch {
    let pixels: Vec<f32> = digits.iter().flat_map(|digit| digit.pixels).collect();
    let labels: Vec<i64> = digits.iter().map(|digit| digit.label).collect();
    let images = TensorData::new(pixels, [digits.len(), 1, 8, 8]);
    (Tensor::from_data(images, device), Tensor::from_data(TensorData::new(labels, [digits.len()]), device))
}
