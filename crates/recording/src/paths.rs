//! Paths of source files, whatever system the recorded program ran on.
//!
//! [`with_slashes`] is the only code that knows separators other than `/`. It is applied to each path when a
//! recording is read. All other code, in every package and on the page, splits paths at `/`, and whole
//! folders are compared, not parts of their names.

use std::borrow::Cow;

use super::stacks::Frame;

/// Folders of PyTorch's own sources, and those of files that its compiler generates. Each is the beginning of
/// a path after a `/`.
const TORCH: &[&str] = &[
    "torch/_",
    "torch/amp/",
    "torch/autograd/",
    "torch/csrc/",
    "torch/cuda/",
    "torch/distributed/",
    "torch/functional.py",
    "torch/nn/",
    "torch/optim/",
    "torch/utils/",
    "torchinductor_",
];

/// The beginnings of the folders of Python's standard library on Linux and macOS.
const STANDARD: &[&str] = &["lib/python3", "lib64/python3", "lib/pypy3"];

/// Returns a path with `/` between its folders. A backslash separates folders, except in a path that begins
/// with one `/`: there it is part of a name.
pub(super) fn with_slashes(path: &str) -> Cow<'_, str> {
    let is_posix = path.starts_with('/') && !path.starts_with("//");
    match !is_posix && path.contains('\\') {
        true => Cow::Owned(path.replace('\\', "/")),
        false => Cow::Borrowed(path),
    }
}

/// Returns true if the text is in the path, at the beginning of the path or after a `/`.
fn has_folder(path: &str, begin: &str) -> bool {
    path.match_indices(begin).any(|(at, _)| at == 0 || path[..at].ends_with('/'))
}

/// Returns each folder of a path with the rest of the path after it, the innermost folder first.
fn folders(path: &str) -> impl Iterator<Item = (&str, &str)> {
    path.rmatch_indices('/').map(|(at, _)| {
        let folder = path[..at].rsplit('/').next().unwrap_or("");
        (folder, &path[at + 1..])
    })
}

/// Returns true if a folder has this name under Windows, where upper and lower case are equal.
fn is_named(folder: &str, name: &str) -> bool {
    folder.eq_ignore_ascii_case(name)
}

/// Returns true if a folder of this name, in the folder `parent`, is an installation of Python under
/// Windows: python.org's, the store's, an embedded one, conda's and its environments, uv's, pyenv's.
fn is_python_home(name: &str, parent: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let begins = ["python_embed", "pythonsoftwarefoundation.", "cpython-"];
    let is_version = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_digit())
            && text.bytes().all(|b| b.is_ascii_digit() || b"._-".contains(&b))
    };
    name.strip_prefix("python").is_some_and(is_version)
        || (name == "python" && parent.ends_with(':'))
        || begins.iter().any(|begin| name.starts_with(begin))
        || ["conda", "miniforge", "mambaforge"].iter().any(|part| name.contains(part))
        || is_named(parent, "envs")
        || (is_named(parent, "versions") && is_version(&name))
}

/// Returns true if a file belongs to Python's standard library.
fn is_standard(path: &str) -> bool {
    if STANDARD.iter().any(|begin| has_folder(path, begin)) {
        return true;
    }
    let is_windows = path.starts_with("//") || path.as_bytes().get(1) == Some(&b':');
    if !is_windows {
        return false;
    }
    let names: Vec<&str> = path.split('/').rev().skip(1).collect();
    let name = |at: usize| names.get(at).copied().unwrap_or("");
    (0..names.len()).any(|at| {
        let is_zip = name(at).starts_with("python3") && name(at).ends_with(".zip");
        is_zip || (is_named(name(at), "lib") && is_python_home(name(at + 1), name(at + 2)))
    })
}

impl<'a> Frame<'a> {
    /// Returns the last component of the file's path.
    pub fn base_name(&self) -> &'a str {
        self.file.rsplit('/').next().unwrap_or(self.file)
    }

    /// Returns true if the text is in the file's path, at its beginning or after a `/`.
    #[must_use]
    pub fn is_in(&self, begin: &str) -> bool {
        has_folder(self.file, begin)
    }

    /// Returns true if the file's path ends with these components.
    pub(super) fn ends_with(&self, end: &str) -> bool {
        let before = self.file.strip_suffix(end);
        before.is_some_and(|before| before.is_empty() || before.ends_with('/'))
    }

    /// Returns true if the file belongs to an installed package, to Python's standard library or to PyTorch.
    pub(super) fn is_of_library(&self) -> bool {
        self.installed_file().is_some()
            || TORCH.iter().any(|begin| self.is_in(begin))
            || is_standard(self.file)
    }

    /// Returns the path of a file of an installed package, from the folder that contains the package on;
    /// `None` for other files. An egg and an unpacked wheel are such folders too.
    #[must_use]
    pub fn installed_file(&self) -> Option<&'a str> {
        let is_installed = |folder: &str| {
            matches!(folder, "site-packages" | "dist-packages")
                || folder.ends_with(".egg")
                || folder.ends_with(".whl")
        };
        folders(self.file).find(|(folder, _)| is_installed(folder)).map(|(_, rest)| rest)
    }

    /// Returns the path of a library's file relative to the folder that contains its package. If no such
    /// folder is known, as for Python's own library, returns the file name alone.
    #[must_use]
    pub fn library_file(&self) -> &'a str {
        let of_torch = || {
            // The profiler records paths relative to the folders of packages.
            let is_relative = self.file.starts_with("torch/");
            let after = || self.file.rsplit_once("/torch/").map(|(before, _)| before.len() + 1);
            Some(&self.file[if is_relative { 0 } else { after()? }..])
        };
        self.installed_file().or_else(of_torch).unwrap_or_else(|| self.base_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FrameKind;

    fn frame(file: &str) -> Frame<'_> {
        Frame { file, line: 1, function: "f" }
    }

    #[test]
    fn every_separator_of_windows_becomes_a_slash() {
        for (recorded, path) in [
            (r"C:\Users\u\app\train.py", "C:/Users/u/app/train.py"),
            (r"D:/repo\app/train.py", "D:/repo/app/train.py"),
            (r"\\server\share\train.py", "//server/share/train.py"),
            (r"//server/share\train.py", "//server/share/train.py"),
            (r"\\?\C:\app\train.py", "//?/C:/app/train.py"),
            (r"app\train.py", "app/train.py"),
            (r".\app/net\block.py", "./app/net/block.py"),
            (r"/home/u/a\b.py", r"/home/u/a\b.py"),
            ("<ipython-input-3-abc>", "<ipython-input-3-abc>"),
        ] {
            assert_eq!(with_slashes(recorded), path);
        }
    }

    #[test]
    fn libraries_are_found_by_whole_folders_on_every_system() {
        for (library, shown) in [
            ("C:/p/.venv/Lib/site-packages/torch/nn/functional.py", "torch/nn/functional.py"),
            ("D:/ComfyUI/python_embeded/Lib/site-packages/einops/einops.py", "einops/einops.py"),
            ("C:/Users/u/AppData/Local/Programs/Python/Python312/Lib/threading.py", "threading.py"),
            ("C:/Users/u/miniconda3/envs/x/lib/concurrent/futures/thread.py", "thread.py"),
            ("C:/ProgramData/Anaconda3/lib/runpy.py", "runpy.py"),
            ("C:/u/.pyenv/pyenv-win/versions/3.11.9/Lib/runpy.py", "runpy.py"),
            ("D:/portable/python312.zip/runpy.py", "runpy.py"),
            ("/usr/lib64/python3.9/threading.py", "threading.py"),
            ("/opt/conda/lib/python3.11/runpy.py", "runpy.py"),
            ("/v/lib/python3.9/site-packages/einops-0.4-py3.9.egg/einops/a.py", "einops/a.py"),
            ("/home/u/.pex/installed_wheels/ab/einops-0.4-py3.whl/einops/a.py", "einops/a.py"),
        ] {
            let frame = frame(library);
            assert_eq!((frame.kind(), frame.library_file()), (FrameKind::Library, shown));
        }
        for own in [
            "C:/Users/u/lib/model.py",
            "C:/repo/python/lib/model.py",
            "/repo/python3/lib/model.py",
            "C:/PythonProjects/lib/model.py",
            "/home/me/learn-torch/nn/model.py",
            "/home/me/my-site-packages/model.py",
            "/tmp/ipykernel_123/456.py",
            "C:/Users/u/AppData/Local/Temp/ipykernel_123/456.py",
        ] {
            assert_eq!(frame(own).kind(), FrameKind::Program, "{own}");
        }
    }
}
