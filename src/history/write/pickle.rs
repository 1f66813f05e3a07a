//! The pickle syntax, protocol 2, with opcodes that every viewer supports.

use std::collections::HashMap;
use std::io::{self, Write};

use super::{Group, Syntax, Value};

const PROTO: &[u8] = &[0x80, 2];
const EMPTY_DICT: u8 = b'}';
const EMPTY_LIST: u8 = b']';
const MARK: u8 = b'(';
const SETITEMS: u8 = b'u';
const APPENDS: u8 = b'e';
const NONE: u8 = b'N';
const TRUE: u8 = 0x88;
const FALSE: u8 = 0x89;
const BININT: u8 = b'J';
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const LONG1: u8 = 0x8a;
const BINFLOAT: u8 = b'G';
const BINUNICODE: u8 = b'X';
const TUPLE2: u8 = 0x86;
const BINPUT: u8 = b'q';
const LONG_BINPUT: u8 = b'r';
const BINGET: u8 = b'h';
const LONG_BINGET: u8 = b'j';
const STOP: u8 = b'.';

/// The items of a list are appended in batches of this size. Otherwise a reader's stack would grow with
/// the list.
const PORTION: u32 = 1000;
/// The most texts, and the most lists, that are remembered. Further ones are written again each time.
const REMEMBERED_MAX: usize = 1 << 19;
/// The longest text that is remembered.
const TEXT_MAX_BYTES: usize = 128;

pub(super) struct Pickle<'o> {
    out: &'o mut dyn Write,
    texts: HashMap<Box<str>, u32>,
    lists: HashMap<usize, u32>,
    next: u32,
    /// The open containers. For a list, the number of items in its current batch. `None` for a
    /// dictionary.
    open: Vec<Option<u32>>,
}

impl<'o> Pickle<'o> {
    pub(super) fn new(out: &'o mut dyn Write) -> io::Result<Self> {
        out.write_all(PROTO)?;
        let (texts, lists) = (HashMap::new(), HashMap::new());
        Ok(Self { out, texts, lists, next: 0, open: Vec::new() })
    }

    /// Must be called before each list item. Starts a new batch if the current one is full.
    fn item(&mut self) -> io::Result<()> {
        if let Some(Some(items)) = self.open.last_mut() {
            if *items == PORTION {
                *items = 0;
                self.out.write_all(&[APPENDS, MARK])?;
            }
            *items += 1;
        }
        Ok(())
    }

    /// Writes an operation on an entry of the memo, in its short form if the number allows that.
    fn memo(&mut self, [short, long]: [u8; 2], number: u32) -> io::Result<()> {
        match u8::try_from(number) {
            Ok(small) => self.operation(short, &[small]),
            Err(_) => self.operation(long, &number.to_le_bytes()),
        }
    }

    fn get(&mut self, number: u32) -> io::Result<()> {
        self.memo([BINGET, LONG_BINGET], number)
    }

    /// Stores the value that was just written in the memo of the pickle. Returns its number there.
    fn put(&mut self) -> io::Result<u32> {
        let number = self.next;
        self.next += 1;
        self.memo([BINPUT, LONG_BINPUT], number).map(|()| number)
    }

    fn operation(&mut self, operation: u8, argument: &[u8]) -> io::Result<()> {
        self.out.write_all(&[operation])?;
        self.out.write_all(argument)
    }

    fn word(&mut self, text: &str) -> io::Result<()> {
        if let Some(number) = self.texts.get(text).copied() {
            return self.get(number);
        }
        let length = u32::try_from(text.len());
        let length = length.map_err(|_| io::Error::other("a text of more than 4 GiB"))?;
        self.operation(BINUNICODE, &length.to_le_bytes())?;
        self.out.write_all(text.as_bytes())?;
        if text.len() <= TEXT_MAX_BYTES && self.texts.len() < REMEMBERED_MAX {
            let number = self.put()?;
            self.texts.insert(text.into(), number);
        }
        Ok(())
    }

    fn whole(&mut self, value: i128) -> io::Result<()> {
        if let Ok(small) = u8::try_from(value) {
            return self.operation(BININT1, &[small]);
        }
        if let Ok(small) = u16::try_from(value) {
            return self.operation(BININT2, &small.to_le_bytes());
        }
        if let Ok(small) = i32::try_from(value) {
            return self.operation(BININT, &small.to_le_bytes());
        }
        // An integer is written in two's complement, in the fewest bytes that preserve the sign.
        let bytes = value.to_le_bytes();
        let sign = if value < 0 { 0xff } else { 0 };
        let mut length = bytes.len();
        while length > 1 && bytes[length - 1] == sign && (bytes[length - 2] ^ sign) & 0x80 == 0 {
            length -= 1;
        }
        self.out.write_all(&[LONG1, u8::try_from(length).unwrap_or(u8::MAX)])?;
        self.out.write_all(&bytes[..length])
    }
}

impl Syntax for Pickle<'_> {
    fn open(&mut self, group: Group) -> io::Result<()> {
        self.item()?;
        let (operation, items) = match group {
            Group::Dict => (EMPTY_DICT, None),
            Group::List => (EMPTY_LIST, Some(0)),
        };
        self.open.push(items);
        self.out.write_all(&[operation, MARK])
    }

    fn key(&mut self, key: &str) -> io::Result<()> {
        self.word(key)
    }

    fn value(&mut self, value: Value<'_>) -> io::Result<()> {
        self.item()?;
        match value {
            Value::None => self.out.write_all(&[NONE]),
            Value::Bool(value) => self.out.write_all(&[if value { TRUE } else { FALSE }]),
            Value::Int(value) => self.whole(value),
            Value::Float(value) => self.operation(BINFLOAT, &value.to_be_bytes()),
            Value::Text(text) => self.word(text),
            Value::Pair(a, b) => {
                self.whole(a.into())?;
                self.whole(b.into())?;
                self.out.write_all(&[TUPLE2])
            }
        }
    }

    fn close(&mut self, group: Group) -> io::Result<()> {
        self.open.pop();
        self.out.write_all(&[if group == Group::Dict { SETITEMS } else { APPENDS }])
    }

    fn again(&mut self, list: usize) -> io::Result<bool> {
        let Some(number) = self.lists.get(&list).copied() else { return Ok(false) };
        self.item()?;
        self.get(number)?;
        Ok(true)
    }

    fn remember_list(&mut self, list: usize) -> io::Result<()> {
        if self.lists.len() < REMEMBERED_MAX {
            let number = self.put()?;
            self.lists.insert(list, number);
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.out.write_all(&[STOP])
    }
}
