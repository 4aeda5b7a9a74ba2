// Mixtures of experts: their gradients, and which experts are read.
#[cfg(test)]
mod tests {
    use super::*;
    use burn::module::{ModuleMapper, ModuleVisitor};
    use burn::tensor::{Distribution, Gradients, TensorData, Tolerance};
    use burn_memsave::checkpoint::checkpoint;
    use burn_memsave::lazy::{LazyLoad, LazyOptions, LazyReport, WeightFile};
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, Instant};

    /// All weights are drawn from one generator.
    fn generator() -> MutexGuard<'static, ()> {
        static GENERATOR: Mutex<()> = Mutex::new(());
        let generator = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
        Device::flex().seed(7);
        generator
    }

    struct Shake;

    impl ModuleMapper for Shake {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| {
                let shaken =
                    value.clone().inner() + value.inner().random_like(Distribution::Normal(0.0, 0.2));
                shaken.autodiff().require_grad()
            })
        }
    }

    /// The gradients of parameters, by their paths.
    struct OfParameters<'a> {
        of: &'a Gradients,
        path: Vec<String>,
        found: BTreeMap<String, TensorData>,
    }

    impl ModuleVisitor for OfParameters<'_> {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = param.val().grad(self.of) {
                self.found.insert(self.path.join("."), gradient.into_data());
            }
        }
    }

    fn gradients(module: &impl Module, of: &Gradients) -> BTreeMap<String, TensorData> {
        let mut found = OfParameters { of, path: vec![], found: BTreeMap::new() };
        module.visit(&mut found);
        found.found
    }

    /// All experts on all tokens, weighted by a matrix that is zero where an expert was not chosen.
    fn dense(mixture: &Mixture, x: Tensor<3>) -> Tensor<3> {
        let shape = x.shape();
        let x = x.flatten::<2>(0, 1);
        let probabilities = softmax(mixture.router.forward(x.clone()), 1);
        let least = probabilities.clone().detach().topk(mixture.chosen, 1).min_dim(1);
        let mask = probabilities.clone().detach().greater_equal(least.expand(probabilities.shape())).float();
        let weights = probabilities * mask;
        let weights = match mixture.normalized {
            true => weights.clone() / weights.sum_dim(1),
            false => weights,
        };
        let of_expert =
            |(at, expert): (usize, &Expert)| expert.forward(x.clone()) * weights.clone().narrow(1, at, 1);
        let sum = mixture.experts.iter().enumerate().map(of_expert).reduce(|sum, y| sum + y);
        let sum = sum.expect("there are experts");
        match mixture.shared(x) {
            Some(shared) => sum + shared,
            None => sum,
        }
        .reshape(shape)
    }

    type Forward = fn(&Mixture, Tensor<3>) -> Tensor<3>;

    /// The output, and the gradients of the input and of the parameters.
    fn run(mixture: &Mixture, x: &Tensor<3>, forward: Forward) -> (TensorData, BTreeMap<String, TensorData>) {
        let x = x.clone().autodiff().require_grad();
        let y = forward(mixture, x.clone());
        let factors = y.clone().inner();
        let factors = Tensor::arange(0..factors.shape().num_elements() as i64, &factors.device())
            .float()
            .cos()
            .reshape(factors.shape())
            .autodiff();
        let of = (y.clone() * factors).sum().backward();
        let mut found = gradients(mixture, &of);
        found.insert("x".into(), x.grad(&of).expect("x is tracked").into_data());
        (y.into_data(), found)
    }

    fn sizes() -> [Experts; 3] {
        let [mixtral, qwen3] = [DecoderSize::MIXTRAL_8X7B, DecoderSize::QWEN3_30B_A3B]
            .map(|size| size.tiny().experts.expect("a mixture"));
        [mixtral, Experts { shared: Some(20), normalized: false, ..qwen3 }, Experts { chosen: 6, ..qwen3 }]
    }

    #[test]
    fn gradients_are_those_of_all_experts_on_all_tokens() {
        let _generator = generator();
        let device = Device::flex();
        for size in sizes() {
            let of = DecoderSize::QWEN3_30B_A3B.tiny();
            let mixture = Mixture::new(&of, &size, &device.clone().autodiff()).map(&mut Shake);
            for shape in [[2, 7, 24], [1, 1, 24]] {
                let x = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), &device);
                let (output, expected) = run(&mixture, &x, dense);
                let recomputed: Forward =
                    |mixture, x| checkpoint(mixture, x, |mixture, x| mixture.forward(x));
                for forward in [Mixture::forward as Forward, recomputed] {
                    let (found_output, found) = run(&mixture, &x, forward);
                    found_output.assert_approx_eq::<f32>(&output, Tolerance::rel_abs(1e-4, 1e-5));
                    assert!(found.contains_key("router.weight") && found.contains_key("x"));
                    for (name, expected) in &expected {
                        match found.get(name) {
                            Some(found) => {
                                found.assert_approx_eq::<f32>(expected, Tolerance::rel_abs(1e-4, 1e-5))
                            }
                            // Of an expert that no token chose.
                            None => assert!(expected.iter::<f32>().all(|x| x == 0.0), "{name}"),
                        }
                    }
                }
            }
        }
    }

    struct Rounded;

    impl ModuleMapper for Rounded {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.cast(DType::BF16))
        }
    }

    /// In half precision, Mixtral rounds the products of outputs and probabilities, and Qwen also the probabilities.
    #[test]
    fn probabilities_are_rounded_as_in_python() {
        let _generator = generator();
        let device = Device::flex();
        let weighted = |size: DecoderSize| {
            let experts = size.experts.expect("a mixture");
            let mixture = Mixture::new(&size, &experts, &device).map(&mut Rounded);
            let x = Tensor::<2>::random([1, 24], Distribution::Normal(0.0, 1.0), &device).cast(DType::BF16);
            let y = mixture.experts[0].forward(x.clone());
            let probability = Tensor::<2>::from_data([[0.3337f32]], &device);
            let visits = Chosen::of(TensorData::from([[1.0f32, 0.0]]), 1).visits();
            let found = mixture.weighted(x, probability.clone(), &visits);
            let product = (y.clone().cast(DType::F32) * probability.clone()).cast(DType::BF16);
            let of_rounded = y * probability.cast(DType::BF16);
            [found, product, of_rounded].map(Tensor::into_data)
        };
        let [found, product, of_rounded] = weighted(DecoderSize::MIXTRAL_8X7B.tiny());
        assert_eq!(found, product);
        assert_ne!(product, of_rounded);
        let [found, _, of_rounded] = weighted(DecoderSize::QWEN3_30B_A3B.tiny());
        assert_eq!(found, of_rounded);
    }

    /// As a plan recomputes blocks: routers choose the same experts again.
    #[test]
    fn blocks_with_mixtures_may_be_recomputed() {
        let _generator = generator();
        let device = Device::flex().autodiff();
        for size in [mixture(), DecoderSize::MIXTRAL_8X7B.tiny()] {
            let model = Llama::new(&size, &device).map(&mut Shake);
            let [now, next] =
                [[3, 17, 4, 29, 33, 8], [17, 4, 29, 33, 8, 2]].map(|text| tokens(&text, &device));
            let kept = model.loss(now.clone(), next.clone());
            let x = model.blocks.iter().fold(model.embedded(now), |x, block| {
                let block = (block.clone(), model.rotary(block).clone());
                checkpoint(&block, x, |(block, rotary), x| block.forward(x, rotary, Part::default()))
            });
            let x = model.normalized(x);
            let recomputed = next_token_loss(x, &model.words, model.head.as_ref(), None, next, None);
            let [(loss, expected), (recomputed, found)] = [kept, recomputed].map(|loss| {
                let of = loss.clone().backward();
                (loss.into_data(), gradients(&model, &of))
            });
            assert_eq!(recomputed, loss);
            assert!(expected.contains_key("blocks.0.mixture.router.weight"));
            assert_eq!(found, expected);
        }
    }

    #[test]
    #[should_panic(expected = "7 of 6 experts cannot be chosen")]
    fn no_more_experts_are_chosen_than_there_are() {
        let size = DecoderSize::MIXTRAL_8X7B.tiny();
        let experts = size.experts.map(|experts| Experts { chosen: 7, ..experts });
        Llama::new(&DecoderSize { experts, ..size }, &Device::flex());
    }

    fn saved(model: &Llama, directory: &Path) -> WeightFile {
        let path = directory.join("model.bpk");
        model.clone().save_file(&path).expect("a file");
        WeightFile::open(path).expect("a file")
    }

    /// With experts that are lazy.
    fn with_lazy_experts(
        size: &DecoderSize,
        device: &Device,
        file: &WeightFile,
        options: LazyOptions,
    ) -> (Llama, LazyReport) {
        let options = options.with_min_bytes(0).include("*.experts");
        Llama::new(size, device).lazy_load(file, &options).expect("weights of this size")
    }

    fn mixture() -> DecoderSize {
        DecoderSize { experts: Some(sizes()[1]), ..DecoderSize::QWEN3_30B_A3B.tiny() }
    }

    fn tokens(tokens: &[i64], device: &Device) -> Tensor<2, Int> {
        Tensor::<1, Int>::from_data(tokens, device).unsqueeze()
    }

    /// Everything else is trained as if they were in memory.
    #[test]
    fn experts_may_be_frozen_and_lazy() {
        let _generator = generator();
        let (size, device) = (mixture(), Device::flex().autodiff());
        let model = Llama::new(&size, &device).map(&mut Shake);
        let directory = tempfile::tempdir().expect("a directory");
        let file = saved(&model, directory.path());
        let (lazy, report) = with_lazy_experts(&size, &device, &file, LazyOptions::new().with_budget(0));
        assert_eq!(report.lazy.len(), 2 * 6 * 3);
        let text = tokens(&[3, 17, 4, 29, 33, 8, 2], &device);
        let loss = |model: &Llama| model.loss(text.clone().narrow(1, 0, 6), text.clone().narrow(1, 1, 6));
        let [(expected_loss, mut expected), (found_loss, found)] = [&model, &lazy].map(|model| {
            let loss = loss(model);
            let of = loss.clone().backward();
            (loss.into_data(), gradients(model, &of))
        });
        found_loss.assert_approx_eq::<f32>(&expected_loss, Tolerance::default());
        expected.retain(|name, _| !name.contains("experts"));
        assert!(expected.contains_key("blocks.0.mixture.router.weight"));
        assert!(found.keys().eq(expected.keys()), "{:?}", found.keys());
        for (name, expected) in &expected {
            println!("{name}");
            found[name].assert_approx_eq::<f32>(expected, Tolerance::rel_abs(1e-3, 1e-5));
        }
    }

    /// With all experts chosen, so that rounding chooses no others.
    #[test]
    fn experts_may_be_in_half_precision() {
        let _generator = generator();
        let device = Device::flex();
        let experts = sizes()[2];
        assert_eq!(experts.chosen, experts.count);
        let size = DecoderSize { experts: Some(experts), ..DecoderSize::QWEN3_30B_A3B.tiny() };
        let model = Llama::new(&size, &device);
        let directory = tempfile::tempdir().expect("a directory");
        let file = saved(&model, directory.path());
        let options = LazyOptions::new().with_min_bytes(0).with_dtype(DType::BF16);
        let (half, _) = Llama::new(&size, &device).lazy_load(&file, &options).expect("weights of this size");
        let [exact, rounded] = [&model, &half].map(|model| model.logits(tokens(&[3, 1, 4], &device)));
        assert_eq!(rounded.dtype(), DType::BF16);
        let largest = exact.clone().abs().max().into_scalar::<f32>();
        let off = (exact - rounded.cast(DType::F32)).abs().max().into_scalar::<f32>();
        assert!(off > 0.0 && off < 0.05 * largest, "{off} of {largest}");
    }

    /// A token reads the experts that it chose, in every layer.
    #[test]
    fn experts_that_nobody_chose_are_not_read() {
        let _generator = generator();
        let (size, device) = (mixture(), Device::flex());
        let model = Llama::new(&size, &device);
        let directory = tempfile::tempdir().expect("a directory");
        let file = saved(&model, directory.path());
        // Nothing is read ahead on a guess.
        let options = LazyOptions::new().with_budget(1 << 30).with_prefetch(0);
        let (lazy, report) = with_lazy_experts(&size, &device, &file, options);
        let lazy = lazy.with_cache(&report.cache);
        let [expected, found] = [&model, &lazy].map(|model| model.logits(tokens(&[3], &device)).into_data());
        found.assert_approx_eq::<f32>(&expected, Tolerance::default());
        // Two of six in two layers, each with three matrices.
        let statistics = report.cache.statistics();
        assert_eq!((report.cache.cached().len(), statistics.reads), (2 * 2 * 3, 2 * 2 * 3));
        assert_eq!(statistics.bytes_read, 2 * 2 * 3 * 24 * 16 * 4);
    }

    /// The thread that reads ahead reads them first, and keeps them where there is no room for others.
    #[test]
    fn chosen_experts_are_announced() {
        let _generator = generator();
        let (size, device) = (mixture(), Device::flex());
        let directory = tempfile::tempdir().expect("a directory");
        let file = saved(&Llama::new(&size, &device), directory.path());
        let options = LazyOptions::new().with_budget(2 * 3 * 24 * 16 * 4).with_prefetch(1);
        let (lazy, report) = with_lazy_experts(&size, &device, &file, options);
        let lazy = lazy.with_cache(&report.cache);
        let mixture = lazy.blocks[1].mixture.as_ref().expect("a mixture");
        let chosen = Chosen::of(TensorData::from([[0.1f32, 0.1, 0.2, 0.0, 0.6, 0.0]]), 2);
        let announcer = mixture.announcer.as_ref().expect("a cache");
        assert_eq!(announcer.announce(&chosen.visits()), 2 * 3);
        let experts = ["blocks.1.mixture.experts.2.", "blocks.1.mixture.experts.4."];
        let is_of_them = |path: &&str| experts.iter().any(|expert| path.starts_with(expert));
        let begin = Instant::now();
        while report.cache.cached().into_iter().filter(is_of_them).count() < 2 * 3 {
            assert!(begin.elapsed() < Duration::from_secs(30), "they are not read: {}", report.cache);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(report.cache.cached().len(), 2 * 3);
    }
}
