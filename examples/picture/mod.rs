//! Samples the memory over one step, and draws it.
use burn::module::Module;
use burn::tensor::Tensor;
use burn_memsave::measure::{StepInput, TrackingAllocator};
use plotters::prelude::*;
use std::error::Error;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Seconds since the step began, and bytes alive beyond those before the step.
pub type Sample = (f64, f64);

/// Samples the memory every 200 microseconds while a forward and backward pass runs.
pub fn sample<M: Module, I: StepInput>(
    model: &M,
    input: &I,
    loss: impl Fn(&M, I) -> Tensor<1>,
) -> Vec<Sample> {
    let input = input.copy();
    let (base, start, done) = (TrackingAllocator::live(), Instant::now(), AtomicBool::new(false));
    std::thread::scope(|threads| {
        let samples = threads.spawn(|| {
            let mut samples = vec![];
            while !done.load(Ordering::Relaxed) {
                let bytes = TrackingAllocator::live().saturating_sub(base);
                samples.push((start.elapsed().as_secs_f64(), bytes as f64));
                std::thread::sleep(Duration::from_micros(200));
            }
            samples
        });
        drop(loss(model, input).backward());
        done.store(true, Ordering::Relaxed);
        samples.join().unwrap_or_default()
    })
}

/// Draws two steps, and the budget if there is one, as SVG.
pub fn draw(
    path: &Path,
    title: &str,
    budget: Option<u64>,
    steps: [(&str, &[Sample]); 2],
) -> Result<(), Box<dyn Error>> {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let samples = || steps.iter().flat_map(|(_, samples)| samples.iter());
    let seconds = samples().map(|sample| sample.0).fold(1e-3, f64::max);
    let budget = budget.map(|bytes| mib(bytes as f64));
    let most = samples().map(|sample| mib(sample.1)).fold(budget.unwrap_or(0.0), f64::max);
    let root = SVGBackend::new(path, (900, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .caption(title, ("sans-serif", 20))
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..seconds, 0.0..most * 1.1)?;
    chart.configure_mesh().x_desc("seconds").y_desc("MiB").label_style(("sans-serif", 14)).draw()?;
    // These colors also differ in grayscale.
    let colours = [RGBColor(213, 94, 0), RGBColor(0, 60, 120)];
    for ((name, samples), colour) in steps.into_iter().zip(colours) {
        let points = samples.iter().map(|&(at, bytes)| (at, mib(bytes)));
        chart
            .draw_series(AreaSeries::new(points, 0.0, colour.mix(0.3)).border_style(colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 24, y + 5)], colour.filled()));
    }
    if let Some(budget) = budget {
        chart
            .draw_series(LineSeries::new([(0.0, budget), (seconds, budget)], BLACK))?
            .label("the budget")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 24, y)], BLACK));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .label_font(("sans-serif", 14))
        .draw()?;
    root.present()?;
    Ok(())
}
