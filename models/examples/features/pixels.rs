//! [`Preprocessor`]: what an encoder reads of an image.
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::error::Error;
use std::fs;
use std::path::Path;

/// An image of three channels, in rows of pixels.
pub struct Rgb {
    pub size: [usize; 2],
    pub bytes: Vec<u8>,
}

/// What `preprocessor_config.json` says.
#[derive(Debug, PartialEq)]
pub struct Preprocessor {
    /// Height and width that images get.
    size: Option<[usize; 2]>,
    scale: f64,
    mean: [f64; 3],
    deviation: [f64; 3],
}

/// A number for both, or one for each.
#[derive(Deserialize)]
#[serde(untagged)]
enum Size {
    Square(usize),
    Both { height: usize, width: usize },
}

/// Fields that change nothing: names, and what is asked of other images.
const WITHOUT_EFFECT: [&str; 6] = [
    "_processor_class",
    "crop_size",
    "data_format",
    "default_to_square",
    "do_convert_rgb",
    "processor_class",
];

impl Preprocessor {
    /// That of the model in a directory. What it asks for and is not there is an error by name.
    pub fn read(model: &Path) -> Result<Self, Box<dyn Error>> {
        let path = model.join("preprocessor_config.json");
        let read = || -> Result<Self, Box<dyn Error>> {
            Self::of_fields(serde_json::from_str(&fs::read_to_string(&path)?)?)
        };
        read().map_err(|error| format!("{}: {error}", path.display()).into())
    }

    fn of_fields(mut fields: Map<String, Value>) -> Result<Self, Box<dyn Error>> {
        // Others have other defaults.
        for field in ["image_processor_type", "feature_extractor_type"] {
            let kind: Option<String> = take(&mut fields, field)?;
            if let Some(kind) = kind.filter(|kind| !kind.starts_with("ViT")) {
                return Err(unsupported(field, kind));
            }
        }
        let mut size = Some([224; 2]);
        if let Some(given) = take::<Size>(&mut fields, "size")? {
            size = Some(match given {
                Size::Square(side) => [side; 2],
                Size::Both { height, width } => [height, width],
            });
        }
        const BILINEAR: u64 = 2;
        let resample = take(&mut fields, "resample")?.unwrap_or(BILINEAR);
        match take(&mut fields, "do_resize")?.unwrap_or(true) {
            true if resample != BILINEAR => return Err(unsupported("resample", resample)),
            true if size.iter().flatten().any(|side| !(1..=1 << 14).contains(side)) => {
                return Err(unsupported("size", format!("{:?}", size.unwrap_or_default())));
            }
            true => (),
            false => size = None,
        }
        let scale = take(&mut fields, "rescale_factor")?.unwrap_or(1.0 / 255.0);
        let scales = take(&mut fields, "do_rescale")?.unwrap_or(true);
        let mean = take(&mut fields, "image_mean")?.unwrap_or([0.5; 3]);
        let deviation = take(&mut fields, "image_std")?.unwrap_or([0.5; 3]);
        let normalizes = take(&mut fields, "do_normalize")?.unwrap_or(true);
        let asks = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
        let is_left =
            |(field, value): &(&String, &Value)| !WITHOUT_EFFECT.contains(&field.as_str()) && asks(value);
        if let Some((field, value)) = fields.iter().find(is_left) {
            return Err(unsupported(field, value));
        }
        Ok(Self {
            size,
            scale: if scales { scale } else { 1.0 },
            mean: if normalizes { mean } else { [0.0; 3] },
            deviation: if normalizes { deviation } else { [1.0; 3] },
        })
    }

    /// Numbers `[3, height, width]`, and height and width.
    pub fn apply(&self, image: Rgb) -> (Vec<f32>, [usize; 2]) {
        let Rgb { size, bytes } = match self.size {
            Some(size) => resized(image, size),
            None => image,
        };
        let value = |byte: u8, channel: usize| {
            ((f64::from(byte) * self.scale - self.mean[channel]) / self.deviation[channel]) as f32
        };
        let channel =
            |channel: usize| bytes.iter().skip(channel).step_by(3).map(move |&byte| value(byte, channel));
        ((0..3).flat_map(channel).collect(), size)
    }
}

/// The value of a field. Null counts as none.
fn take<T: DeserializeOwned>(
    fields: &mut Map<String, Value>,
    field: &str,
) -> Result<Option<T>, Box<dyn Error>> {
    match fields.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => serde_json::from_value(value.clone()).map(Some).map_err(|_| unsupported(field, value)),
    }
}

fn unsupported(field: &str, value: impl std::fmt::Display) -> Box<dyn Error> {
    format!("{field} is {value}, which is not supported").into()
}

/// Bilinear, as PIL computes it: a triangle as wide as two pixels of the smaller image, first along rows and then along columns, with a result
/// in whole numbers each time.
pub fn resized(image: Rgb, [height, width]: [usize; 2]) -> Rgb {
    let Rgb { size: [rows, columns], bytes } = image;
    let along_rows = Weights::new(columns, width);
    let narrow: Vec<u8> = bytes
        .chunks_exact(3 * columns.max(1))
        .flat_map(|row| along_rows.all().flat_map(move |sum| [0, 1, 2].map(|at| sum.of(row, 3, at))))
        .collect();
    let along_columns = Weights::new(rows, height);
    let line = 3 * width;
    let bytes =
        along_columns.all().flat_map(|sum| (0..line).map(|at| sum.of(&narrow, line, at)).collect::<Vec<_>>());
    Rgb { size: [height, width], bytes: bytes.collect() }
}

/// For each pixel of a resized row, the first pixel that it is made of, and the weights of this and the next ones.
struct Weights(Vec<(usize, Vec<f64>)>);

#[derive(Clone, Copy)]
struct Sum<'a> {
    first: usize,
    weights: &'a [f64],
}

impl Weights {
    fn new(from: usize, to: usize) -> Self {
        let scale = from as f64 / to as f64;
        let support = scale.max(1.0);
        Self((0..to).map(|at| Self::of(from, (at as f64 + 0.5) * scale, support)).collect())
    }

    fn of(count: usize, center: f64, support: f64) -> (usize, Vec<f64>) {
        let first = (center - support + 0.5).max(0.0) as usize;
        let end = ((center + support + 0.5) as usize).min(count);
        let triangle = |at: usize| (1.0 - ((at as f64 + 0.5 - center) / support).abs()).max(0.0);
        let weights: Vec<f64> = (first..end).map(triangle).collect();
        let all: f64 = weights.iter().sum();
        (first, weights.iter().map(|weight| weight / all).collect())
    }

    fn all(&self) -> impl Iterator<Item = Sum<'_>> {
        self.0.iter().map(|(first, weights)| Sum { first: *first, weights })
    }
}

impl Sum<'_> {
    /// Of every `step`-th byte.
    fn of(&self, bytes: &[u8], step: usize, at: usize) -> u8 {
        let bytes = bytes.iter().skip(self.first * step + at).step_by(step);
        let sum: f64 = self.weights.iter().zip(bytes).map(|(weight, &byte)| weight * f64::from(byte)).sum();
        (sum + 0.5) as u8 // at most 255
    }
}
