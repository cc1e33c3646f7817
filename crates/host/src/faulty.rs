//! A host that fails where it is told to.
