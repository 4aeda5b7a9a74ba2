// Mixtures of experts. A part of `decoder.rs`.

/// One of several feed-forward layers: `down(gate(x))`.
#[derive(Module, Debug)]
pub struct Expert {
    gate: SwiGlu,
    down: Linear,
}

impl Expert {
    fn new(width: usize, hidden: usize, device: &Device) -> Self {
        Self {
            gate: SwiGluConfig::new(width, hidden).init(device),
            down: linear_layer(hidden, width, false, device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(self.gate.forward(x))
    }
}

/// A mixture of experts: the sum of `p_i expert_i(x)` over those experts that have the largest of the probabilities `p = softmax(router(x))`,
/// and, if there is one, `sigmoid(shared_gate(x)) shared(x)`. Only experts that some token chose run, on the tokens that chose them. In training,
/// the choice is fixed, and the router learns by the probabilities of the experts that were chosen.
#[derive(Module, Debug)]
pub struct Mixture {
    router: Linear,
    experts: Vec<Expert>,
    shared: Option<Expert>,
    shared_gate: Option<Linear>,
    /// The experts of a token.
    chosen: usize,
    /// Whether the probabilities of the chosen experts are divided by their sum.
    normalized: bool,
    /// Mixtral multiplies outputs of experts with probabilities in f32, and Qwen with rounded ones.
    is_mixtral: bool,
    #[module(skip)]
    announcer: Option<Announcer>,
}

impl Mixture {
    /// # Panics
    ///
    /// If no experts are chosen, or more than there are.
    fn new(size: &DecoderSize, experts: &Experts, device: &Device) -> Self {
        let (width, &Experts { count, chosen, hidden, normalized, shared, .. }) = (size.width, experts);
        assert!((1..=count).contains(&chosen), "{chosen} of {count} experts cannot be chosen");
        Self {
            router: linear_layer(width, count, false, device),
            experts: (0..count).map(|_| Expert::new(width, hidden, device)).collect(),
            shared: shared.map(|hidden| Expert::new(width, hidden, device)),
            shared_gate: shared.map(|_| linear_layer(width, 1, false, device)),
            chosen,
            normalized,
            // The mixtures of Qwen2 have an expert for all tokens, and those of Qwen3 normalize heads.
            is_mixtral: shared.is_none() && !size.normalizes_heads,
            announcer: None,
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let shape = x.shape();
        let x = x.flatten::<2>(0, 1);
        let probabilities = softmax(self.router.forward(x.clone()).cast(DType::F32), 1);
        let chosen = Chosen::of(probabilities.clone().into_data(), self.chosen);
        let visits = chosen.visits();
        if let Some(announcer) = &self.announcer {
            announcer.announce(&visits);
        }
        // While the weights of the others are read.
        let shared = self.shared(x.clone());
        let weights = probabilities.gather(1, chosen.experts(&x.device()));
        let weights = match self.normalized {
            true => weights.clone() / weights.sum_dim(1),
            false => weights,
        };
        let sum = self.weighted(x, weights, &visits);
        match shared {
            Some(shared) => sum + shared,
            None => sum,
        }
        .reshape(shape)
    }

    /// The outputs `[tokens, width]` of the experts, each multiplied by its weight of `[tokens, chosen for each]`, and added.
    fn weighted(&self, x: Tensor<2>, weights: Tensor<2>, visits: &[Visits]) -> Tensor<2> {
        let device = x.device();
        let dtype = if self.is_mixtral { DType::F32 } else { x.dtype() };
        let weights = weights.cast(dtype).reshape([-1, 1]);
        visits.iter().fold(x.zeros_like(), |sum, visits| {
            let tokens = visits.tokens(&device);
            let y = self.experts[visits.expert].forward(x.clone().select(0, tokens.clone()));
            let y = y.cast(dtype) * weights.clone().select(0, visits.places(&device));
            sum.select_assign(0, tokens, y.cast(x.dtype()), IndexingUpdateOp::Add)
        })
    }

    /// What the expert of all tokens adds.
    fn shared(&self, x: Tensor<2>) -> Option<Tensor<2>> {
        let (shared, gate) = self.shared.as_ref().zip(self.shared_gate.as_ref())?;
        Some(sigmoid(gate.forward(x.clone())) * shared.forward(x))
    }
}
