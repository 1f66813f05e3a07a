//! `compat:` and the versions of PyTorch that it names.

use super::*;

#[test]
fn compat_names_a_version_of_pytorch() {
    for minor in 10..=15 {
        let text = format!("compat:pytorch-2.{minor}");
        let config = parse(&text).unwrap();
        let named = Compat::Version(TorchVersion::nearest(2, minor));
        assert_eq!(config.settings().compat, named);
        assert_eq!(config.to_text(), text);
        assert_eq!(named.or_version(TorchVersion::V2_11), named, "a version that is named stays");
    }
    let expected = "default, pytorch, or pytorch-2.10 to pytorch-2.15";
    for text in ["compat:pytorch-2.9", "compat:pytorch-2.16", "compat:pytorch-2", "compat:pytorch-"]
    {
        assert_eq!(parse(text).unwrap_err().expected, expected, "{text}");
    }
    let running = Compat::PyTorch.or_version(TorchVersion::nearest(2, 13));
    assert_eq!(running.decisions().ties, Ties::SegmentAge);
    assert_eq!(Compat::PyTorch.decisions(), TorchVersion::V2_11.decisions());
}

#[test]
fn a_version_of_pytorch_that_is_not_known_counts_as_the_nearest_one() {
    for (release, name) in [
        ((1, 13), "pytorch-2.10"),
        ((2, 3), "pytorch-2.10"),
        ((2, 12), "pytorch-2.12"),
        ((2, 99), "pytorch-2.15"),
        ((3, 0), "pytorch-2.15"),
    ] {
        assert_eq!(TorchVersion::nearest(release.0, release.1).name(), name);
    }
}
