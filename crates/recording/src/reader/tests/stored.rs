//! Writes an xz file without compression, because the crate that decompresses is built without its
//! compressor.
//!
//! Source: "The .xz File Format", 1.2.1.

/// Returns `bytes`, at most 64 KiB, as an xz file with one stream of one block.
pub(super) fn xz(bytes: &[u8]) -> Vec<u8> {
    const FLAGS: [u8; 2] = [0, 1];
    let mut out = b"\xfd7zXZ\0".to_vec();
    out.extend(FLAGS);
    out.extend(crc(&FLAGS));

    // One filter, LZMA2, with the smallest window.
    let header = [2, 0, 0x21, 1, 0, 0, 0, 0];
    let mut block = header.to_vec();
    block.extend(crc(&header));
    // One uncompressed chunk that resets the window, then the end.
    block.push(1);
    block.extend(u16::try_from(bytes.len() - 1).unwrap().to_be_bytes());
    block.extend(bytes);
    block.push(0);
    let unpadded = block.len() + 4;
    pad(&mut block);
    block.extend(crc(bytes));
    out.extend(block);

    let mut index = vec![0, 1];
    number(unpadded, &mut index);
    number(bytes.len(), &mut index);
    pad(&mut index);
    index.extend(crc(&index));
    out.extend(&index);

    let mut footer = u32::try_from(index.len() / 4 - 1).unwrap().to_le_bytes().to_vec();
    footer.extend(FLAGS);
    out.extend(crc(&footer));
    out.extend(footer);
    out.extend(b"YZ");
    out
}

fn crc(bytes: &[u8]) -> [u8; 4] {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum().to_le_bytes()
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

fn number(mut number: usize, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(u8::try_from(number & 0x7f).unwrap() | 0x80);
        number >>= 7;
    }
    out.push(u8::try_from(number).unwrap());
}
