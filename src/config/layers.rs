//! The value of `layers:[limit:8GiB,track,log:"PATH"]`, typed and validated.
//!
//! The first layer of the list is the outermost: requests reach it first. A layer may occur twice.
//! `src/layers` implements and documents the layers.

use super::bytes;
use super::error::ConfigError;
use super::parse::{Value, pairs};
use super::token::{Kind, Token};
use crate::size::{GIB, KIB, MIB};

/// The most layers of one allocator.
const LAYERS_MAX: usize = 16;
/// The most retries of `oom_retry`.
const RETRIES_MAX: u32 = 1000;
/// The largest alignment.
const ALIGN_MAX_BYTES: u64 = GIB;
/// The largest limit that `front` accepts. Its tables grow with the limit.
const FRONT_MAX_BYTES: u64 = MIB;
/// The largest block that `front` caches by default.
const FRONT_DEFAULT_BYTES: u64 = 64 * KIB;

/// One layer with its parameters. Sizes are bytes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum LayerSetting {
    /// `limit:SIZE`: limits the live bytes.
    Limit {
        /// The most live bytes.
        bytes: u64,
    },
    /// `statistics`: counts the bytes that callers hold.
    Statistics,
    /// `track`: reports leaks with stacks when the allocator is dropped or the process ends.
    Track,
    /// `log:"PATH"`: writes a file in RMM's format.
    Log {
        /// The path of the file.
        path: String,
    },
    /// `fault:[call:K,probability:P,seed:N,above:SIZE]`: fails requests on purpose.
    Fault(FaultSetting),
    /// `oom_retry:TIMES`: retries requests that are out of memory.
    OomRetry {
        /// The most retries of one request.
        times: u32,
    },
    /// `align:SIZE`: aligns every block.
    Align {
        /// The alignment, a power of two.
        bytes: u64,
    },
    /// `guard`: adds guard bytes around each block, and checks at the free that they were not
    /// overwritten.
    Guard,
    /// `front` or `front:SIZE`: caches small blocks per thread.
    Front {
        /// The largest block that is cached, in bytes.
        block_max_bytes: u64,
    },
}

impl LayerSetting {
    /// Returns true if the layer may return other addresses than the allocator below it.
    #[doc(hidden)]
    pub fn may_move_blocks(&self) -> bool {
        matches!(self, Self::Align { .. } | Self::Guard)
    }

    /// Returns the path of the file that the layer writes, if it writes one.
    #[doc(hidden)]
    pub fn written_file(&self) -> Option<&std::path::Path> {
        match self {
            Self::Log { path } => Some(path.as_ref()),
            _ => None,
        }
    }
}

/// The rule by which requests fail on purpose. A request fails if any of the fields matches it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FaultSetting {
    /// `call`: fails the request with this number, counted from 1.
    pub call: Option<u64>,
    /// `probability`: fails each request with this probability, in [0, 1].
    pub probability: f64,
    /// `seed`: the seed of the random numbers.
    pub seed: u64,
    /// `above`: fails each request of more bytes than this.
    pub above_bytes: Option<u64>,
}

/// For each layer: its name, its syntax, and the description of the expected text in errors.
const LAYERS: [(&str, &str, &str); 9] = [
    ("limit", "limit:SIZE", "limit:SIZE, as limit:8GiB"),
    ("statistics", "statistics", "statistics without a value"),
    ("track", "track", "track without a value"),
    ("log", "log:\"PATH\"", "log:\"PATH\""),
    ("fault", "fault:[...]", "fault:[call:5], with at least one part"),
    ("oom_retry", "oom_retry:TIMES", "oom_retry:TIMES, as oom_retry:3"),
    ("align", "align:SIZE", "align:SIZE, as align:4KiB"),
    ("guard", "guard", "guard without a value"),
    ("front", "front or front:SIZE", "front or front:SIZE"),
];
const FAULTS: &str = "call:K, probability:P, seed:N or above:SIZE";

/// Returns the syntax of all layers, for an error message.
fn all_layers() -> String {
    LAYERS.map(|(_, syntax, _)| syntax).join(", ")
}

/// The parameters that follow the name of a layer.
enum Parameters<'v, 't> {
    Nothing,
    Word(&'v Token<'t>),
    List(&'v [Token<'t>]),
}

/// Parses the list of layers.
pub(super) fn layers(key: &str, value: &Value<'_>) -> Result<Vec<LayerSetting>, ConfigError> {
    if !value.is_list {
        return Err(ConfigError::new(
            key,
            value.span,
            format!("a list in brackets of {}", all_layers()),
        ));
    }
    let mut found = Vec::new();
    let mut rest = value.tokens.as_slice();
    while let [name, more @ ..] = rest {
        if found.len() == LAYERS_MAX {
            let what = format!("at most {LAYERS_MAX} layers");
            return Err(ConfigError::new(key, name.span, what));
        }
        if name.kind != Kind::Word {
            return Err(ConfigError::new(key, name.span, all_layers()));
        }
        let (parameters, more) = parameters(key, more)?;
        found.push(layer(key, name, &parameters)?);
        rest = match more {
            [] => &[],
            [comma] if comma.kind == Kind::Comma => {
                return Err(ConfigError::new(key, comma.span, "a layer behind the comma"));
            }
            [comma, more @ ..] if comma.kind == Kind::Comma => more,
            [other, ..] => {
                return Err(ConfigError::new(key, other.span, "a comma or a closing bracket"));
            }
        };
    }
    Ok(found)
}

/// Parses the parameters of a layer. Also returns the tokens behind them.
fn parameters<'v, 't>(
    key: &str,
    rest: &'v [Token<'t>],
) -> Result<(Parameters<'v, 't>, &'v [Token<'t>]), ConfigError> {
    match rest {
        [colon, word, more @ ..] if colon.kind == Kind::Colon && word.is_word() => {
            Ok((Parameters::Word(word), more))
        }
        [colon, open, more @ ..] if colon.kind == Kind::Colon && open.kind == Kind::Open => {
            // The brackets of the whole list match, so a bracket inside it has its partner.
            let mut depth = 1;
            let end = more.iter().position(|token| {
                match token.kind {
                    Kind::Open => depth += 1,
                    Kind::Close => depth -= 1,
                    _ => {}
                }
                depth == 0
            });
            let end = end.ok_or_else(|| ConfigError::new(key, open.span, "a closing bracket"))?;
            Ok((Parameters::List(&more[..end]), &more[end + 1..]))
        }
        [colon, ..] if colon.kind == Kind::Colon => {
            Err(ConfigError::new(key, colon.span, "a value for this layer"))
        }
        rest => Ok((Parameters::Nothing, rest)),
    }
}

fn layer(
    key: &str,
    name: &Token<'_>,
    parameters: &Parameters<'_, '_>,
) -> Result<LayerSetting, ConfigError> {
    Ok(match (name.text, parameters) {
        ("limit", Parameters::Word(word)) => LayerSetting::Limit { bytes: size(key, word)? },
        ("statistics", Parameters::Nothing) => LayerSetting::Statistics,
        ("track", Parameters::Nothing) => LayerSetting::Track,
        ("guard", Parameters::Nothing) => LayerSetting::Guard,
        ("log", Parameters::Word(path)) => {
            if path.text.is_empty() || path.text.contains('\0') {
                return Err(ConfigError::new(key, path.span, "the path of a file"));
            }
            LayerSetting::Log { path: path.text.to_owned() }
        }
        ("fault", Parameters::List(tokens)) => fault(key, name, tokens)?,
        ("oom_retry", Parameters::Word(times)) => {
            let legal = times.text.parse().ok().filter(|n| (1..=RETRIES_MAX).contains(n));
            let what = format!("a whole number from 1 to {RETRIES_MAX}");
            let times = legal.ok_or_else(|| ConfigError::new(key, times.span, what))?;
            LayerSetting::OomRetry { times }
        }
        ("align", Parameters::Word(word)) => {
            let bytes = size(key, word)?;
            if !bytes.is_power_of_two() || bytes > ALIGN_MAX_BYTES {
                return Err(ConfigError::new(key, word.span, "a power of two up to 1GiB"));
            }
            LayerSetting::Align { bytes }
        }
        ("front", Parameters::Nothing) => {
            LayerSetting::Front { block_max_bytes: FRONT_DEFAULT_BYTES }
        }
        ("front", Parameters::Word(word)) => {
            let block_max_bytes = size(key, word)?;
            if !(512..=FRONT_MAX_BYTES).contains(&block_max_bytes) {
                return Err(ConfigError::new(key, word.span, "a size from 512B to 1MiB"));
            }
            LayerSetting::Front { block_max_bytes }
        }
        (other, _) => {
            let wrong = |what: &str| ConfigError::new(key, name.span, what);
            return Err(match LAYERS.iter().find(|(name, ..)| *name == other) {
                Some((_, _, expected)) => wrong(expected),
                None => wrong(&all_layers()).or_nearest(other, &LAYERS.map(|(name, ..)| name)),
            });
        }
    })
}

fn fault(key: &str, name: &Token<'_>, tokens: &[Token<'_>]) -> Result<LayerSetting, ConfigError> {
    let span = name.span;
    let list = Value { tokens: tokens.to_vec(), is_list: true, span, text: name.text };
    let mut setting = FaultSetting::default();
    let mut chooses = false;
    for (part, word) in pairs(key, &list, FAULTS)? {
        let wrong = |what: &str| ConfigError::new(key, word.span, what);
        chooses |= part.text != "seed";
        match part.text {
            "call" => {
                let call = word.text.parse().ok().filter(|n| *n >= 1);
                setting.call = Some(call.ok_or_else(|| wrong("a whole number >= 1"))?);
            }
            "probability" => {
                let legal = |p: &f64| (0.0..=1.0).contains(p);
                let probability = word.text.parse().ok().filter(legal);
                setting.probability = probability.ok_or_else(|| wrong("a number from 0 to 1"))?;
            }
            "seed" => {
                setting.seed = word.text.parse().map_err(|_| wrong("a whole number"))?;
            }
            "above" => setting.above_bytes = Some(size(key, word)?),
            _ => return Err(ConfigError::new(key, part.span, FAULTS)),
        }
    }
    if !chooses {
        return Err(ConfigError::new(key, span, "fault with call, probability or above"));
    }
    Ok(LayerSetting::Fault(setting))
}

fn size(key: &str, word: &Token<'_>) -> Result<u64, ConfigError> {
    bytes::size(key, word.text, word.span)
}

impl LayerSetting {
    /// Returns the layer as it is written in a configuration string.
    #[doc(hidden)]
    pub fn text(&self) -> String {
        match self {
            Self::Limit { bytes } => format!("limit:{}", bytes::to_text(*bytes)),
            Self::Statistics => "statistics".to_owned(),
            Self::Track => "track".to_owned(),
            Self::Log { path } => format!("log:\"{path}\""),
            Self::Fault(fault) => {
                let call = fault.call.map(|call| format!("call:{call}"));
                let above =
                    fault.above_bytes.map(|bytes| format!("above:{}", bytes::to_text(bytes)));
                // A `fault` layer needs at least one selector. `probability:0` is one, although it
                // matches no request.
                let chosen = call.is_some() || above.is_some();
                let chance = (fault.probability > 0.0 || !chosen)
                    .then(|| format!("probability:{}", fault.probability));
                let seed = (fault.seed != 0).then(|| format!("seed:{}", fault.seed));
                let parts: Vec<String> =
                    [call, chance, seed, above].into_iter().flatten().collect();
                format!("fault:[{}]", parts.join(","))
            }
            Self::OomRetry { times } => format!("oom_retry:{times}"),
            Self::Align { bytes } => format!("align:{}", bytes::to_text(*bytes)),
            Self::Guard => "guard".to_owned(),
            Self::Front { block_max_bytes: FRONT_DEFAULT_BYTES } => "front".to_owned(),
            Self::Front { block_max_bytes } => {
                format!("front:{}", bytes::to_text(*block_max_bytes))
            }
        }
    }
}
