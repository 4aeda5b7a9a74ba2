//! [`divide`]: which device owns what.

/// Divides things of these sizes among `owners` owners. Returns the owner of each.
///
/// The largest thing comes first (of equal ones, the first in the list); each goes to the owner that has the least so far (of equal ones, the
/// first). So no owner has more than the mean and the largest thing together, and the same sizes are always divided in the same way.
///
/// ```
/// use burn_memsave::parallel::divide;
///
/// assert_eq!(divide(&[10, 70, 30, 40], 2), [0, 0, 1, 1]);
/// ```
///
/// # Panics
///
/// Panics if there are no owners.
pub fn divide(bytes: &[u64], owners: usize) -> Vec<usize> {
    assert!(owners > 0, "nobody to own {} things", bytes.len());
    let mut order: Vec<usize> = (0..bytes.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(bytes[index])); // stable
    let (mut has, mut owner_of) = (vec![0u64; owners], vec![0; bytes.len()]);
    for index in order {
        let least = (0..owners).min_by_key(|&owner| has[owner]).expect("an owner"); // the first of equal ones
        has[least] = has[least].saturating_add(bytes[index]);
        owner_of[index] = least;
    }
    owner_of
}

#[cfg(test)]
mod tests {
    use super::divide;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_owner_has_more_than_the_mean_and_the_largest(
            bytes in prop::collection::vec(0u64..1000, 0..40), owners in 1usize..6,
        ) {
            let owner_of = divide(&bytes, owners);
            prop_assert_eq!(&owner_of, &divide(&bytes, owners));
            prop_assert_eq!(owner_of.len(), bytes.len());
            let (sum, largest) = (bytes.iter().sum::<u64>(), bytes.iter().copied().max().unwrap_or(0));
            for owner in 0..owners {
                let has: u64 = bytes.iter().zip(&owner_of).filter(|(_, of)| **of == owner).map(|(bytes, _)| bytes).sum();
                prop_assert!(has <= sum / owners as u64 + largest, "{} of {:?}", has, bytes);
            }
        }
    }

    #[test]
    fn the_first_of_equal_ones_is_first() {
        assert_eq!(divide(&[5, 5, 5, 5], 2), [0, 1, 0, 1]);
        assert_eq!(divide(&[1, 9], 4), [1, 0]);
        assert_eq!(divide(&[], 3), [0; 0]);
        assert_eq!(divide(&[0, 0], 2), [0, 0], "nothing to divide");
    }
}
