//! Which experts a router chooses for which tokens, and who is told of it.
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_memsave::lazy::LazyCache;

/// The experts that were chosen for some tokens.
pub(crate) struct Chosen {
    /// For each token its experts, the most probable one first.
    experts: Vec<i64>,
    /// The experts of a token.
    of_token: usize,
    /// All experts.
    count: usize,
}

/// An expert, and the tokens for which it was chosen.
pub(crate) struct Visits {
    pub(crate) expert: usize,
    /// The tokens.
    tokens: Vec<i64>,
    /// The places in [`Chosen::experts`].
    places: Vec<i64>,
}

impl Chosen {
    /// Those with the largest of the probabilities `[tokens, experts]`. Of equal ones, the first.
    pub(crate) fn of(probabilities: TensorData, of_token: usize) -> Self {
        let [_, count] = probabilities.shape().dims();
        let probabilities: Vec<f32> = probabilities.iter::<f32>().collect();
        let chosen = probabilities.chunks_exact(count).flat_map(|token| {
            let mut experts: Vec<usize> = (0..count).collect();
            experts.sort_unstable_by(|&a, &b| token[b].total_cmp(&token[a]).then(a.cmp(&b)));
            experts.into_iter().take(of_token).map(|expert| expert as i64)
        });
        Self { experts: chosen.collect(), of_token, count }
    }

    /// `[tokens, chosen for each]`
    pub(crate) fn experts(&self, device: &Device) -> Tensor<2, Int> {
        let shape = [self.experts.len() / self.of_token, self.of_token];
        Tensor::from_data(TensorData::new(self.experts.clone(), shape), device)
    }

    /// The experts that were chosen for any token, in their order.
    pub(crate) fn visits(&self) -> Vec<Visits> {
        let none = |expert| Visits { expert, tokens: vec![], places: vec![] };
        let mut visits: Vec<Visits> = (0..self.count).map(none).collect();
        for (place, &expert) in self.experts.iter().enumerate() {
            let Visits { tokens, places, .. } = &mut visits[expert as usize];
            tokens.push((place / self.of_token) as i64);
            places.push(place as i64);
        }
        visits.retain(|visits| !visits.tokens.is_empty());
        visits
    }
}

impl Visits {
    /// The tokens, `[visits]`.
    pub(crate) fn tokens(&self, device: &Device) -> Tensor<1, Int> {
        on(device, &self.tokens)
    }

    /// Where their choice of this expert is among the choices of all tokens, `[visits]`.
    pub(crate) fn places(&self, device: &Device) -> Tensor<1, Int> {
        on(device, &self.places)
    }
}

fn on(device: &Device, numbers: &[i64]) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(numbers.to_vec(), [numbers.len()]), device)
}

/// The cache with the weights of a layer's experts, if they are lazy.
#[derive(Clone, Debug)]
pub(crate) struct Announcer {
    pub(crate) cache: LazyCache,
    /// The path of the experts.
    pub(crate) path: String,
}

impl Announcer {
    /// Says that these experts are next, so that they are read ahead. Returns the number of their lazy weights.
    pub(crate) fn announce(&self, visits: &[Visits]) -> usize {
        self.cache.expect(visits.iter().map(|visits| format!("{}.{}", self.path, visits.expert)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_probable_experts_are_chosen() {
        let probabilities = [[0.1f32, 0.4, 0.2, 0.3], [0.3, 0.3, 0.1, 0.3], [0.0, f32::NAN, 0.0, 0.0]];
        let chosen = Chosen::of(TensorData::from(probabilities), 2);
        assert_eq!(chosen.experts, [1, 3, 0, 1, 1, 0]);
        let visits = chosen.visits().into_iter().map(|visits| (visits.expert, visits.tokens, visits.places));
        let expected =
            [(0, vec![1, 2], vec![2, 5]), (1, vec![0, 1, 2], vec![0, 3, 4]), (3, vec![0], vec![1])];
        assert_eq!(visits.collect::<Vec<_>>(), expected);
    }
}
