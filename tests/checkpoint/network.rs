//! Random networks.
