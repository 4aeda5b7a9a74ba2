//! [`write_features`]: all features of some inputs, in a file.
use crate::inputs::{Inputs, batches};
use crate::output::Output;
use burn_memsave::lazy::LazyCache;
use burn_memsave_models::{FeatureEncoder, FeatureOptions, Pooling, features};
use indicatif::{ProgressBar, ProgressStyle};
use std::error::Error;
use std::path::Path;
use std::time::Instant;

/// What is computed, and where it goes.
pub struct Settings<'a> {
    pub output: &'a Path,
    pub pooling: Pooling,
    pub layer: Option<usize>,
    /// Tokens of a batch, with padding.
    pub at_once: usize,
}

/// What was computed, and how.
pub struct Run {
    pub inputs: usize,
    pub tokens: usize,
    pub batches: usize,
    pub seconds: f64,
    /// Bytes of weights.
    pub read: u64,
}

/// Writes the features of all inputs, of which there is at least one. `cache` holds the weights.
pub fn write_features<I: Inputs>(
    encoder: &impl FeatureEncoder<Batch = I::Batch>,
    inputs: &I,
    settings: &Settings<'_>,
    cache: &LazyCache,
) -> Result<Run, Box<dyn Error>> {
    let (tokens, is_all) = (inputs.tokens(), settings.pooling == Pooling::All);
    let rows: Vec<usize> = tokens.iter().map(|&tokens| if is_all { tokens } else { 1 }).collect();
    let batches = batches(tokens, settings.at_once);
    let options = FeatureOptions::new(settings.pooling);
    let options = settings.layer.map_or(options, |layer| options.with_layer(layer));

    let bar = ProgressBar::new(tokens.len() as u64)
        .with_style(ProgressStyle::with_template("{bar:30} {pos}/{len}, {elapsed} of {duration}")?);
    let (begin, mut output, mut unread) = (Instant::now(), None, None);
    let read = batches.iter().map_while(|batch| match inputs.batch(batch) {
        Ok(inputs) => Some(inputs),
        Err(error) => {
            unread = Some(error);
            None
        }
    });
    for (batch, features) in batches.iter().zip(features(encoder, read, options)) {
        // Which text it is in the file is known here only.
        let features = features.map_err(|error| format!("batch of {}: {error}", inputs.names(batch)))?;
        let [_, width] = features.dims();
        let output = match &mut output {
            Some(output) => output,
            None => output.insert(Output::create(settings.output, &rows, width, is_all)?),
        };
        output.write(batch, features.into_data())?;
        bar.inc(batch.len() as u64);
    }
    if let Some(error) = unread {
        return Err(error);
    }
    bar.finish();
    output.map_or(Ok(()), Output::finish)?;
    let statistics = cache.statistics();
    Ok(Run {
        inputs: tokens.len(),
        tokens: tokens.iter().sum(),
        batches: batches.len(),
        seconds: begin.elapsed().as_secs_f64(),
        read: statistics.bytes_read + statistics.bytes_unpacked,
    })
}
