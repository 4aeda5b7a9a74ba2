//! What a segment keeps.
