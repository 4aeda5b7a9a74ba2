//! [`Images`]: those in a file, or in a folder.
use crate::inputs::Inputs;
use burn::tensor::{Device, Tensor};
use burn_memsave::lazy::WeightFile;
use std::error::Error;
use std::path::{Path, PathBuf};

/// Images, of which a batch is read at a time.
pub struct Images {
    source: Source,
    path: PathBuf,
    tokens: Vec<usize>,
}

enum Source {
    /// Numbers in a file.
    Tensor(WeightFile),
    #[cfg(feature = "images")]
    Files(crate::pixels::Preprocessor, Vec<PathBuf>),
}

/// The tensor of images.
const IMAGES: &str = "images";

impl Images {
    /// The images in a file, or in a folder as the model in a directory reads them. Each becomes so many tokens.
    pub fn open(model: &Path, data: &Path, tokens: usize) -> Result<Self, Box<dyn Error>> {
        let (source, count) = if data.is_dir() { folder(model, data)? } else { tensor(data)? };
        match count {
            0 => Err(format!("{}: there are no images", data.display()).into()),
            _ => Ok(Self { source, path: data.to_path_buf(), tokens: vec![tokens; count] }),
        }
    }
}

fn tensor(data: &Path) -> Result<(Source, usize), Box<dyn Error>> {
    let file = WeightFile::open(data)?;
    let images = file.tensors().find(|tensor| tensor.name == IMAGES).map(|tensor| tensor.shape.to_vec());
    match images.as_deref() {
        Some(&[count, _, _, _]) => Ok((Source::Tensor(file), count)),
        Some(shape) => {
            Err(format!("{}: {IMAGES} is {shape:?}, and images have four axes", data.display()).into())
        }
        None => Err(format!("{}: there is no tensor {IMAGES}", data.display()).into()),
    }
}

#[cfg(not(feature = "images"))]
fn folder(_model: &Path, data: &Path) -> Result<(Source, usize), Box<dyn Error>> {
    Err(format!("{} is a folder, and images in files need the feature `images`", data.display()).into())
}

/// The files in a folder that are images by their names, in the order of these.
#[cfg(feature = "images")]
fn folder(model: &Path, data: &Path) -> Result<(Source, usize), Box<dyn Error>> {
    let mut files = vec![];
    for entry in std::fs::read_dir(data).map_err(|error| format!("{}: {error}", data.display()))? {
        let path = entry?.path();
        let end = path.extension().and_then(|end| end.to_str()).map(str::to_lowercase);
        if end.is_some_and(|end| ["jpeg", "jpg", "png"].contains(&end.as_str())) {
            files.push(path);
        }
    }
    files.sort();
    let count = files.len();
    Ok((Source::Files(crate::pixels::Preprocessor::read(model)?, files), count))
}

/// An image as numbers `[1, 3, height, width]`.
#[cfg(feature = "images")]
fn decoded(
    preprocessor: &crate::pixels::Preprocessor,
    path: &Path,
) -> Result<Tensor<4>, image::error::ImageError> {
    use image::{DynamicImage, ImageDecoder, ImageReader};
    let mut decoder = ImageReader::open(path)?.with_guessed_format()?.into_decoder()?;
    let orientation = decoder.orientation()?;
    let mut image = DynamicImage::from_decoder(decoder)?;
    image.apply_orientation(orientation);
    let image = image.into_rgb8();
    let size = [image.height() as usize, image.width() as usize];
    let (numbers, [height, width]) = preprocessor.apply(crate::pixels::Rgb { size, bytes: image.into_raw() });
    let data = burn::tensor::TensorData::new(numbers, [1, 3, height, width]);
    Ok(Tensor::from_data(data, &Device::flex()))
}

impl Inputs for Images {
    type Batch = Tensor<4>;

    fn tokens(&self) -> &[usize] {
        &self.tokens
    }

    fn batch(&self, numbers: &[usize]) -> Result<Self::Batch, Box<dyn Error>> {
        match &self.source {
            Source::Tensor(file) => {
                const BATCH: &str = "batch";
                let rows: Vec<_> = numbers.iter().map(|&image| (BATCH, image..image + 1)).collect();
                let file = file.clone().with_rows(&format!("^{IMAGES}$"), &rows)?;
                Ok(Tensor::from_data(file.read(BATCH)?, &Device::flex()))
            }
            #[cfg(feature = "images")]
            Source::Files(preprocessor, files) => {
                let images = numbers.iter().map(|&image| {
                    let path = &files[image];
                    decoded(preprocessor, path).map_err(|error| format!("{}: {error}", path.display()))
                });
                let images: Vec<_> = images.collect::<Result<_, _>>()?;
                // Without a size in the configuration, images keep theirs.
                if let Some(at) = images.iter().position(|image| image.dims() != images[0].dims()) {
                    let paths = [0, at].map(|at| files[numbers[at]].display());
                    return Err(format!("{} and {} have different sizes", paths[0], paths[1]).into());
                }
                Ok(Tensor::cat(images, 0))
            }
        }
    }

    fn names(&self, numbers: &[usize]) -> String {
        format!("{} images of {}", numbers.len(), self.path.display())
    }
}
