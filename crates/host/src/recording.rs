//! A host read back from a folder.
