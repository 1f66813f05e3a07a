//! What a page says of a recording is what the recording says.
