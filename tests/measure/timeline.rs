//! The memory over a step.
use crate::{RECORDS, alone, cpu_devices};
use burn::module::Module;
use burn::tensor::Tensor;
use burn_memsave::measure::{Moment, Timeline, measure_step, timeline};
use burn_memsave::nn::{Linear, LinearConfig};

const ROWS: usize = 256;
const WIDE: usize = 128;

#[allow(clippy::ptr_arg)] // a slice is no module
fn loss(model: &Vec<Linear>, x: Tensor<2>) -> Tensor<1> {
    model.iter().fold(x, |x, layer| layer.forward(x)).mean()
}

fn of_layers(count: usize) -> Vec<(Vec<Linear>, Timeline, Tensor<2>)> {
    let of_device = |device| {
        let layer = || LinearConfig::new(WIDE, WIDE).init(&device);
        let model: Vec<Linear> = (0..count).map(|_| layer()).collect();
        let x = Tensor::<2>::ones([ROWS, WIDE], &device);
        let timeline = timeline(&model, x.clone(), loss);
        (model, timeline, x)
    };
    cpu_devices().into_iter().map(of_device).collect()
}

/// Categories of a chain of linear layers, of which each keeps its input: known without a measurement.
#[test]
fn categories_are_what_layers_keep() {
    let _alone = alone();
    for (model, timeline, _) in of_layers(3) {
        let x = (4 * ROWS * WIDE) as u64;
        let layer = (4 * (WIDE * WIDE + WIDE)) as u64;
        let seen: Vec<_> = timeline
            .moments
            .iter()
            .map(|moment| {
                let Moment { phase, module, input, activation, gradient, .. } = moment;
                (*phase, module.as_str(), *input, *activation, *gradient)
            })
            .collect();
        let expected = [
            ("start", "", x, 0, 0),
            ("forward", "0", x, 0, 0),
            ("forward", "1", x, x, 0),
            ("forward", "2", x, 2 * x, 0),
            ("turn", "", x, 2 * x, 0),
            ("backward", "2", x, x, layer),
            ("backward", "1", x, 0, 2 * layer),
            ("backward", "0", 0, 0, 3 * layer),
            ("end", "", 0, 0, 3 * layer),
        ];
        assert_eq!(seen, expected, "{timeline}");
        let parameters = 4 * model.num_params() as u64;
        assert!(timeline.moments.iter().all(|moment| moment.parameter == parameters));

        // What is counted beyond that is the tensor on its way, and records.
        let temporary = |number: usize| timeline.moments[number].temporary.expect("bytes are counted");
        for (number, on_its_way) in [(0, 0), (1, x), (2, x), (3, x), (4, 0), (5, x), (6, x), (8, 0)] {
            let found = temporary(number);
            assert!((on_its_way..on_its_way + 3 * RECORDS).contains(&found), "{number}: {found}\n{timeline}");
        }
    }
}

/// The peak is that which a measurement of the step finds.
#[test]
fn the_peak_is_that_of_the_step() {
    let _alone = alone();
    drop(of_layers(4)); // makes what threads work in
    for (model, timeline, x) in of_layers(4) {
        let input = (4 * ROWS * WIDE) as u64;
        let measured = measure_step(&model, x, loss).peak.expect("bytes are counted");
        let peak = timeline.peak().expect("bytes are counted") - timeline.moments[0].parameter - input;
        assert!(peak.abs_diff(measured) < 2 * RECORDS, "{peak} {measured}\n{timeline}");
    }
}

#[test]
fn a_timeline_is_written_as_a_trace_and_a_plot() {
    let _alone = alone();
    let Some((_, timeline, _)) = of_layers(2).pop() else { return };
    let with_state = timeline.clone().with_optimizer_state(1000);
    assert_eq!(with_state.peak(), timeline.peak().map(|peak| peak + 1000));
    assert!(with_state.moments.iter().all(|moment| moment.optimizer_state == 1000));

    let trace = timeline.to_chrome_trace();
    let trace: serde_json::Value = serde_json::from_str(&trace).expect("valid JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    let memory: Vec<_> = events.iter().filter(|event| event["name"] == "memory").collect();
    assert_eq!(memory.len(), timeline.moments.len());
    assert!(memory.iter().all(|event| event["ph"] == "C"));
    assert_eq!(memory[2]["args"]["activation"], timeline.moments[2].activation);
    let operations: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(operations.len(), 4);
    assert_eq!((&operations[3]["args"]["module"], &operations[3]["cat"]), (&"0".into(), &"backward".into()));

    let svg = timeline.to_svg();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    // Parameters, input, activations, gradients, and what is temporary.
    assert_eq!(svg.matches("<polygon").count(), 5, "{svg}");
    assert_eq!(svg.matches("<polyline").count(), 1);
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");

    let csv = timeline.to_csv();
    assert!(csv.starts_with("seconds,phase,module,operation,parameter,optimizer_state,input,"), "{csv}");
    assert_eq!(csv.lines().count(), timeline.moments.len() + 1);
    assert!(timeline.to_json().contains("\"phase\": \"turn\""));
}

/// Without a gradient there is no backward pass.
#[test]
fn a_frozen_model_has_no_backward_pass() {
    let _alone = alone();
    for device in cpu_devices() {
        let model = vec![LinearConfig::new(8, 8).init(&device).freeze()];
        let timeline = timeline(&model, Tensor::ones([4, 8], &device), loss);
        let phases: Vec<_> = timeline.moments.iter().map(|moment| moment.phase).collect();
        assert_eq!(phases, ["start", "forward", "turn"], "{timeline}");
        assert_eq!(timeline.moments[1].module, "linear");
    }
}
