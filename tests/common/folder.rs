//! A temporary folder, deleted when the test ends.

use std::path::PathBuf;

pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let own = format!("stratalloc-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(own);
        std::fs::create_dir_all(&folder).expect("a test may make a folder");
        Self(folder)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("names are text").to_owned()
    }

    pub(crate) fn file(&self, name: &str, content: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).expect("a test may write there");
        path
    }

    /// Returns the names of the files in the folder.
    pub(crate) fn names(&self) -> Vec<String> {
        let files = std::fs::read_dir(&self.0).expect("it is there");
        let names = files.map(|file| file.expect("it is there").file_name().into_string());
        names.map(|name| name.expect("names are text")).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
