//! The fields of an answer's JSON, from its schema.

use schemars::schema_for;
use serde_json::Value;

use super::Answer;

/// A number in the JSON of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name: the names of the objects that contain it and its own, with dots between. The number is in
    /// bytes if the name ends in `_bytes`.
    pub name: String,
    /// Its meaning.
    pub meaning: String,
}

/// Returns the schema of an answer's JSON, as JSON.
#[must_use]
pub fn schema() -> Value {
    schema_for!(Answer).to_value()
}

/// Returns the numbers of an answer that are in no list, in the order of their names.
#[must_use]
pub fn fields() -> Vec<Field> {
    let schema = schema();
    let mut all = Vec::new();
    collect(&schema, &schema, "", &mut all);
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all.dedup_by(|a, b| a.name == b.name);
    all
}

/// Adds the numbers that a schema describes. Schemas do not contain themselves.
fn collect(schema: &Value, root: &Value, prefix: &str, all: &mut Vec<Field>) {
    let schema = resolved(schema, root);
    for part in ["anyOf", "allOf", "oneOf"] {
        let parts = schema[part].as_array().into_iter().flatten();
        parts.for_each(|part| collect(part, root, prefix, all));
    }
    for (name, of) in schema["properties"].as_object().into_iter().flatten() {
        let name = format!("{prefix}{name}");
        let meaning = of["description"].as_str().unwrap_or_default().replace('\n', " ");
        if is_number(resolved(of, root)) {
            all.push(Field { name, meaning });
        } else {
            collect(of, root, &format!("{name}."), all);
        }
    }
}

fn resolved<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let place = schema["$ref"].as_str().and_then(|place| place.strip_prefix('#'));
    place.and_then(|place| root.pointer(place)).unwrap_or(schema)
}

fn is_number(schema: &Value) -> bool {
    let is_one = |kind: &Value| kind == "integer" || kind == "number";
    is_one(&schema["type"]) || schema["type"].as_array().is_some_and(|all| all.iter().any(is_one))
}
