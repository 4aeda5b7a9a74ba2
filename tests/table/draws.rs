//! Random draws for property tests: the same few in every run, or as many as you want from another seed.
//!
//! `MEMSAVE_DRAWS=200` sets how many values every test draws, and `MEMSAVE_SEED` the seed. If only the number of draws is set, the seed
//! comes from the clock, and a failure prints it.
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

const DRAWS: &str = "MEMSAVE_DRAWS";
const SEED: &str = "MEMSAVE_SEED";

/// Runs `test` on drawn values: by default on `cases` of them, the same ones every time.
pub fn for_all<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value)) {
    let draws = number(DRAWS);
    let seed = number(SEED).unwrap_or_else(|| match draws {
        None => 0x5eed,
        Some(_) => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64),
    });
    let cases = draws.map_or(cases, |draws| u32::try_from(draws).expect("fewer draws"));
    let config =
        Config { cases, rng_seed: RngSeed::Fixed(seed), failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&strategy, |value| {
        test(value);
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}\nAgain: {DRAWS}={cases} {SEED}={seed}"));
}

fn number(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|error| panic!("{name}={value}: {error}")))
}
