//! Values of JSON that are read one by one and not kept: numbers, texts and lists of numbers.
//!
//! Anything else is skipped without recursion, so files may contain other values in these places.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The longest part of a text that is read, in bytes.
const TEXT_MAX_BYTES: usize = 1024;

/// A value without structure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum JsonScalar {
    Whole(i128),
    Float(f64),
    /// A text, which was stored in the seed's buffer.
    Text,
    /// Any other value.
    Other,
}

impl JsonScalar {
    /// Returns a whole number. A float without a fraction is one too.
    pub(super) fn whole(self) -> Option<i128> {
        match self {
            Self::Whole(number) => Some(number),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "floats saturate, and are bounded here"
            )]
            Self::Float(number) if number.fract() == 0.0 && number.abs() < 1e18 => {
                Some(number as i128)
            }
            _ => None,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a time")]
    pub(super) fn float(self) -> Option<f64> {
        match self {
            Self::Whole(number) => Some(number as f64),
            Self::Float(number) => Some(number),
            _ => None,
        }
    }
}

/// Reads a scalar. The first bytes of a text replace the content of `text`.
pub(super) struct ScalarSeed<'t> {
    pub(super) text: &'t mut String,
}

impl<'de> DeserializeSeed<'de> for ScalarSeed<'_> {
    type Value = JsonScalar;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<JsonScalar, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ScalarSeed<'_> {
    type Value = JsonScalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<JsonScalar, E> {
        Ok(JsonScalar::Other)
    }

    fn visit_unit<E>(self) -> Result<JsonScalar, E> {
        Ok(JsonScalar::Other)
    }

    fn visit_i64<E>(self, number: i64) -> Result<JsonScalar, E> {
        Ok(JsonScalar::Whole(number.into()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<JsonScalar, E> {
        Ok(JsonScalar::Whole(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<JsonScalar, E> {
        Ok(JsonScalar::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<JsonScalar, E> {
        let mut end = text.len().min(TEXT_MAX_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.text.clear();
        self.text.push_str(&text[..end]);
        Ok(JsonScalar::Text)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<JsonScalar, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(JsonScalar::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonScalar, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(JsonScalar::Other)
    }
}

/// Reads a list of at most `N` numbers. The rest of a longer list is skipped and counted.
pub(super) struct NumbersSeed<const N: usize>;

/// The numbers of a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers<const N: usize> {
    /// The first numbers; 0 for what is not a whole number.
    pub(super) first: [i128; N],
    /// The number of items.
    pub(super) len: u64,
    pub(super) last: i128,
    /// Whether every item was a whole number.
    pub(super) is_whole: bool,
}

impl<'de, const N: usize> DeserializeSeed<'de> for NumbersSeed<N> {
    type Value = Numbers<N>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de, const N: usize> Visitor<'de> for NumbersSeed<N> {
    type Value = Numbers<N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut text = String::new();
        let mut found = Numbers { first: [0; N], len: 0, last: 0, is_whole: true };
        while let Some(item) = items.next_element_seed(ScalarSeed { text: &mut text })? {
            let number = item.whole();
            found.is_whole &= number.is_some();
            found.last = number.unwrap_or(0);
            if let Some(place) =
                usize::try_from(found.len).ok().and_then(|at| found.first.get_mut(at))
            {
                *place = found.last;
            }
            found.len += 1;
        }
        Ok(found)
    }
}

/// Reads a list of lists of numbers. The function gets each of them, and returns the text of an error for one
/// that is malformed.
pub(super) struct EachSeed<const N: usize, F>(pub(super) F);

impl<'de, const N: usize, F> DeserializeSeed<'de> for EachSeed<N, F>
where
    F: FnMut(&Numbers<N>) -> Result<(), String>,
{
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de, const N: usize, F> Visitor<'de> for EachSeed<N, F>
where
    F: FnMut(&Numbers<N>) -> Result<(), String>,
{
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of lists of numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        while let Some(numbers) = items.next_element_seed(NumbersSeed::<N>)? {
            (self.0)(&numbers).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}
