//! The JSON syntax. Texts are escaped so that a file can be embedded in an HTML page.

use std::io::{self, Write};

use super::{Group, Syntax, Value};

pub(super) struct Json<'o> {
    out: &'o mut dyn Write,
    /// For each open container, whether it has an item already.
    open: Vec<bool>,
    /// True if a key was just written.
    after_key: bool,
}

impl<'o> Json<'o> {
    pub(super) fn new(out: &'o mut dyn Write) -> Self {
        Self { out, open: Vec::new(), after_key: false }
    }

    /// Writes the comma before a key or an item of a list, if there was an item before it.
    fn separate(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.after_key) {
            return Ok(());
        }
        let has_items = self.open.last_mut().is_some_and(|open| std::mem::replace(open, true));
        if has_items { self.out.write_all(b",") } else { Ok(()) }
    }

    fn quoted(&mut self, text: &str) -> io::Result<()> {
        self.out.write_all(b"\"")?;
        let mut plain = 0;
        for (at, c) in text.char_indices() {
            // `<` is escaped, so that a text cannot contain `</script>`.
            if !matches!(c, '"' | '\\' | '<' | '\u{2028}' | '\u{2029}') && !c.is_control() {
                continue;
            }
            self.out.write_all(&text.as_bytes()[plain..at])?;
            write!(self.out, "\\u{:04x}", u32::from(c))?;
            plain = at + c.len_utf8();
        }
        self.out.write_all(&text.as_bytes()[plain..])?;
        self.out.write_all(b"\"")
    }
}

impl Syntax for Json<'_> {
    fn open(&mut self, group: Group) -> io::Result<()> {
        self.separate()?;
        self.open.push(false);
        self.out.write_all(if group == Group::Dict { b"{" } else { b"[" })
    }

    fn key(&mut self, key: &str) -> io::Result<()> {
        self.separate()?;
        self.quoted(key)?;
        self.after_key = true;
        self.out.write_all(b":")
    }

    fn value(&mut self, value: Value<'_>) -> io::Result<()> {
        self.separate()?;
        match value {
            Value::None => self.out.write_all(b"null"),
            Value::Bool(value) => write!(self.out, "{value}"),
            Value::Int(value) => write!(self.out, "{value}"),
            Value::Float(value) => write!(self.out, "{value:?}"),
            Value::Text(text) => self.quoted(text),
            Value::Pair(a, b) => write!(self.out, "[{a},{b}]"),
        }
    }

    fn close(&mut self, group: Group) -> io::Result<()> {
        self.open.pop();
        self.out.write_all(if group == Group::Dict { b"}" } else { b"]" })
    }

    fn finish(&mut self) -> io::Result<()> {
        self.out.write_all(b"\n")
    }
}
