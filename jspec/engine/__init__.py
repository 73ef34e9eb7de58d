"""Engines: compiled programs of fixed shape around the pure functions of `decoding`."""
