//! Runs the opcodes of a pickle, with a stack, marks and a memo, without recursion.
//!
//! No length in the file is trusted before its bytes have arrived, memo numbers need not be consecutive,
//! and all growth is charged to the budget. An opcode that would construct an object is an error.

use std::collections::HashMap;

use super::opcode as op;
use crate::reader::Limits;
use crate::reader::budget::OverBudget;
use crate::reader::error::{Failure, PickleProblem};
use crate::reader::heap::{Constant, Heap, Value, View};
use crate::reader::input::Input;
use crate::reader::words::WORD_MAX_BYTES;

/// The memory of one entry of `Machine::sparse`, including the table's free slots.
const SPARSE_ENTRY_BYTES: u64 = 64;

/// Runs the pickle and returns its values. Trailing bytes are an error.
pub(in crate::reader) fn parse(input: &mut Input<'_>, limits: &Limits) -> Result<Heap, Failure> {
    let mut machine = Machine {
        input,
        limits,
        heap: Heap::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        dense: Vec::new(),
        sparse: HashMap::new(),
    };
    machine.run()?;
    let Machine { mut heap, input, .. } = machine;
    let at = input.offset();
    // Looking for more bytes also verifies the checksum of a compressed file.
    if !input.peek()?.is_empty() {
        let problem = PickleProblem::Trailing;
        return Err(Failure::Pickle { at, problem });
    }
    heap.decoded_bytes = at;
    Ok(heap)
}

struct Machine<'m, 'i> {
    input: &'m mut Input<'i>,
    limits: &'m Limits,
    heap: Heap,
    stack: Vec<Value>,
    /// The height of the stack at each open mark.
    marks: Vec<usize>,
    /// Memo entries 0, 1, 2 and so on, if they are stored in this order, as picklers do.
    dense: Vec<Value>,
    /// Memo entries that were not stored in this order.
    sparse: HashMap<u64, Value>,
}

/// The reason why an opcode failed.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
enum MachineStop {
    Problem(#[from] PickleProblem),
    OverBudget(#[from] OverBudget),
    Input(#[from] Failure),
}

fn misses(opcode: &'static str, expected: &'static str) -> MachineStop {
    PickleProblem::Stack { opcode, expected }.into()
}

impl Machine<'_, '_> {
    fn run(&mut self) -> Result<(), Failure> {
        loop {
            let at = self.input.offset();
            self.heap.budget.decoded(at);
            match self.step() {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(MachineStop::Problem(problem)) => return Err(Failure::Pickle { at, problem }),
                Err(MachineStop::OverBudget(_)) => {
                    return Err(Failure::Pickle { at, problem: PickleProblem::Memory });
                }
                Err(MachineStop::Input(failure)) => return Err(failure),
            }
        }
    }

    /// Runs one opcode. Returns false after `STOP`.
    fn step(&mut self) -> Result<bool, MachineStop> {
        let [opcode] = self.bytes()?;
        match opcode {
            op::STOP => {
                self.heap.root = self.pop("STOP")?;
                return Ok(false);
            }
            op::PROTO => {
                let [protocol] = self.bytes()?;
                if !(2..=5).contains(&protocol) {
                    return Err(PickleProblem::Protocol(protocol).into());
                }
            }
            // The length of a pickle frame is ignored: it helps only readers without a buffer.
            op::FRAME => {
                self.bytes::<8>()?;
            }
            op::MARK => self.mark()?,
            op::POP => {
                self.pop("POP")?;
            }

            op::NONE => self.push(Value::constant(Constant::None))?,
            op::NEWTRUE => self.push(Value::constant(Constant::True))?,
            op::NEWFALSE => self.push(Value::constant(Constant::False))?,
            op::BINFLOAT => {
                self.bytes::<8>()?;
                self.push(Value::constant(Constant::Float))?;
            }
            op::BININT1 => self.unsigned::<1>()?,
            op::BININT2 => self.unsigned::<2>()?,
            op::BININT => {
                let n = i32::from_le_bytes(self.bytes()?);
                let value = self.heap.signed(n.into())?;
                self.push(value)?;
            }
            op::LONG1 => self.long()?,
            op::SHORT_BINUNICODE | op::SHORT_BINBYTES => self.text_or_bytes::<1>(opcode)?,
            op::BINUNICODE | op::BINBYTES => self.text_or_bytes::<4>(opcode)?,
            op::BINUNICODE8 | op::BINBYTES8 => self.text_or_bytes::<8>(opcode)?,
            _ => return self.step_structure(opcode),
        }
        Ok(true)
    }

    /// Runs an opcode for containers or the memo.
    fn step_structure(&mut self, opcode: u8) -> Result<bool, MachineStop> {
        match opcode {
            op::EMPTY_TUPLE => self.push(Value::EMPTY_TUPLE)?,
            op::TUPLE => self.tuple("TUPLE", None)?,
            op::TUPLE1 => self.tuple("TUPLE1", Some(1))?,
            op::TUPLE2 => self.tuple("TUPLE2", Some(2))?,
            op::TUPLE3 => self.tuple("TUPLE3", Some(3))?,
            op::EMPTY_LIST => {
                let list = self.heap.list()?;
                self.push(list)?;
            }
            op::EMPTY_DICT => {
                let dict = self.heap.dict()?;
                self.push(dict)?;
            }
            op::APPEND => self.append("APPEND", Some(1))?,
            op::APPENDS => self.append("APPENDS", None)?,
            op::SETITEM => self.set_items("SETITEM", Some(2))?,
            op::SETITEMS => self.set_items("SETITEMS", None)?,

            op::MEMOIZE => {
                let top = self.top("MEMOIZE")?;
                let entries = self.dense.len() + self.sparse.len();
                self.remember(entries as u64, top)?;
            }
            op::BINPUT => self.put::<1>("BINPUT")?,
            op::LONG_BINPUT => self.put::<4>("LONG_BINPUT")?,
            op::BINGET => self.recall::<1>()?,
            op::LONG_BINGET => self.recall::<4>()?,
            _ => {
                let constructing = op::CONSTRUCTING.iter().find(|(known, _)| *known == opcode);
                let unused = PickleProblem::Unused(opcode);
                let problem =
                    constructing.map_or(unused, |(_, name)| PickleProblem::Constructs(name));
                return Err(problem.into());
            }
        }
        Ok(true)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], MachineStop> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), MachineStop> {
        if self.input.fill(into)? { Ok(()) } else { Err(PickleProblem::Ends.into()) }
    }

    /// Reads a little-endian number of `N` bytes, at most 8.
    fn number<const N: usize>(&mut self) -> Result<u64, MachineStop> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&self.bytes::<N>()?);
        Ok(u64::from_le_bytes(wide))
    }

    fn push(&mut self, value: Value) -> Result<(), MachineStop> {
        self.heap.budget.reserve(&mut self.stack, 1)?;
        self.stack.push(value);
        Ok(())
    }

    fn unsigned<const N: usize>(&mut self) -> Result<(), MachineStop> {
        let number = self.number::<N>()?;
        let value = self.heap.int(number)?;
        self.push(value)
    }

    /// Reads a little-endian integer in two's complement. Its length in bytes precedes it.
    fn long(&mut self) -> Result<(), MachineStop> {
        let [len] = self.bytes()?;
        let mut digits = [0; u8::MAX as usize];
        let digits = &mut digits[..usize::from(len)];
        self.fill(digits)?;
        let is_negative = digits.last().is_some_and(|last| *last >= 0x80);
        let filler = if is_negative { 0xff } else { 0 };
        // Nine bytes hold every number of 64 bits and its sign.
        let (low, high) = digits.split_at(digits.len().min(9));
        let mut wide = [filler; size_of::<i128>()];
        wide[..low.len()].copy_from_slice(low);
        let is_huge = high.iter().any(|digit| *digit != filler);
        let number = if is_huge { i128::MAX } else { i128::from_le_bytes(wide) };
        let value = match (u64::try_from(number), i64::try_from(number)) {
            (Ok(number), _) => self.heap.int(number)?,
            (_, Ok(number)) => self.heap.signed(number)?,
            _ => Value::constant(Constant::Huge),
        };
        self.push(value)
    }

    /// Reads a text or bytes. Their length precedes them, in `N` bytes.
    fn text_or_bytes<const N: usize>(&mut self, opcode: u8) -> Result<(), MachineStop> {
        let len = self.number::<N>()?;
        let is_text = matches!(opcode, op::SHORT_BINUNICODE | op::BINUNICODE | op::BINUNICODE8);
        let mut short = [0; WORD_MAX_BYTES];
        let value = match usize::try_from(len) {
            Ok(len) if is_text && len <= WORD_MAX_BYTES => {
                let short = &mut short[..len];
                self.fill(short)?;
                self.heap.text_or_word(short)?
            }
            _ if is_text => {
                let text = self.heap.start_text(len)?;
                self.long_content(len, true)?;
                text
            }
            _ => {
                self.long_content(len, false)?;
                Value::constant(Constant::Bytes)
            }
        };
        self.push(value)
    }

    /// Reads `len` bytes piece by piece. Keeps them if `keep` is true, which is so for texts.
    fn long_content(&mut self, len: u64, keep: bool) -> Result<(), MachineStop> {
        let mut left = len;
        while left > 0 {
            let at_hand = self.input.peek()?;
            if at_hand.is_empty() {
                return Err(PickleProblem::Ends.into());
            }
            let count = usize::try_from(left).map_or(at_hand.len(), |left| left.min(at_hand.len()));
            if keep {
                self.heap.push_bytes(&at_hand[..count])?;
            }
            self.input.consume(count);
            self.heap.budget.decoded(self.input.offset());
            left -= count as u64;
        }
        Ok(())
    }

    fn mark(&mut self) -> Result<(), MachineStop> {
        if self.marks.len() >= self.limits.nesting {
            return Err(PickleProblem::Nesting(self.limits.nesting).into());
        }
        self.heap.budget.reserve(&mut self.marks, 1)?;
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Returns the height of the stack below the last `count` values. Fails if there are fewer values above
    /// the innermost mark.
    fn below(&self, opcode: &'static str, count: usize) -> Result<usize, MachineStop> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let height = self.stack.len().checked_sub(count);
        height.filter(|&height| height >= floor).ok_or_else(|| misses(opcode, "more values"))
    }

    fn top(&self, opcode: &'static str) -> Result<Value, MachineStop> {
        self.below(opcode, 1).map(|at| self.stack[at])
    }

    fn pop(&mut self, opcode: &'static str) -> Result<Value, MachineStop> {
        let top = self.top(opcode)?;
        self.stack.pop();
        Ok(top)
    }

    /// Returns the height of the stack below the last `count` values. Without a count, removes the
    /// innermost mark and returns its height.
    fn from(&mut self, opcode: &'static str, count: Option<usize>) -> Result<usize, MachineStop> {
        match count {
            Some(count) => self.below(opcode, count),
            None => self.marks.pop().ok_or_else(|| misses(opcode, "a mark")),
        }
    }

    fn tuple(&mut self, opcode: &'static str, count: Option<usize>) -> Result<(), MachineStop> {
        let from = self.from(opcode, count)?;
        let tuple = self.heap.tuple(&self.stack[from..])?;
        self.stack.truncate(from);
        self.push(tuple)
    }

    /// Returns the value just below height `from`. It must be above the innermost mark.
    fn under(&self, opcode: &'static str, from: usize) -> Result<Value, MachineStop> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let at = from.checked_sub(1).filter(|&at| at >= floor);
        at.map(|at| self.stack[at]).ok_or_else(|| misses(opcode, "a container"))
    }

    fn append(&mut self, opcode: &'static str, count: Option<usize>) -> Result<(), MachineStop> {
        let from = self.from(opcode, count)?;
        let list = self.under(opcode, from)?;
        if !matches!(self.heap.view(list), View::List(_)) {
            return Err(misses(opcode, "a list"));
        }
        self.heap.append(list, &self.stack[from..])?;
        self.stack.truncate(from);
        Ok(())
    }

    fn set_items(&mut self, opcode: &'static str, count: Option<usize>) -> Result<(), MachineStop> {
        let from = self.from(opcode, count)?;
        let dict = self.under(opcode, from)?;
        if !matches!(self.heap.view(dict), View::Dict(_)) {
            return Err(misses(opcode, "a dictionary"));
        }
        let pairs = &self.stack[from..];
        if !pairs.len().is_multiple_of(2) {
            return Err(misses(opcode, "a value for each key"));
        }
        self.heap.set_items(dict, pairs)?;
        self.stack.truncate(from);
        Ok(())
    }

    fn put<const N: usize>(&mut self, opcode: &'static str) -> Result<(), MachineStop> {
        let index = self.number::<N>()?;
        let top = self.top(opcode)?;
        self.remember(index, top)
    }

    fn remember(&mut self, index: u64, value: Value) -> Result<(), MachineStop> {
        let place = usize::try_from(index).unwrap_or(usize::MAX);
        if let Some(entry) = self.dense.get_mut(place) {
            *entry = value;
        } else if place == self.dense.len() && self.sparse.is_empty() {
            self.heap.budget.reserve(&mut self.dense, 1)?;
            self.dense.push(value);
        } else {
            if !self.sparse.contains_key(&index) {
                self.heap.budget.charge(SPARSE_ENTRY_BYTES)?;
            }
            self.sparse.insert(index, value);
        }
        Ok(())
    }

    fn recall<const N: usize>(&mut self) -> Result<(), MachineStop> {
        let index = self.number::<N>()?;
        let dense = usize::try_from(index).ok().and_then(|place| self.dense.get(place));
        let value = dense.or_else(|| self.sparse.get(&index)).copied();
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        self.push(value.ok_or(PickleProblem::Memo(number))?)
    }
}
