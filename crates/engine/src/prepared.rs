//! A monitor prepared ahead, before the frozen machine that it will run exists.

use crate::{
    EngineError, Image, Result, VmPaths, kvm::fds::VmFds, process::blocking, qemu::waiting::WaitingVm, record,
};

/// What waits for a thaw: a prepared VM. Dropping it ends its process and clears its directories;
/// so does [`PreparedVm::cancel`], which also waits until the process is gone.
pub struct PreparedVm {
    image: Image,
    paths: VmPaths,
    /// None once a thaw has taken it.
    waiting: Option<Waiting>,
}

/// What an engine prepared.
pub(crate) enum Waiting {
    /// Open descriptors: a process is forked when they are used.
    Kvm(VmFds),
    /// A QEMU that waits for a device state.
    Qemu(Box<WaitingVm>),
    #[cfg(any(test, feature = "fake"))]
    Fake,
}

impl PreparedVm {
    pub(crate) fn new(image: &Image, paths: VmPaths, waiting: Waiting) -> Self {
        Self { image: image.clone(), paths, waiting: Some(waiting) }
    }

    /// The memory image that it was prepared for.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// The paths that the machine will have.
    #[must_use]
    pub fn paths(&self) -> &VmPaths {
        &self.paths
    }

    /// Whether it still waits.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        match &self.waiting {
            Some(Waiting::Kvm(_)) => true,
            #[cfg(any(test, feature = "fake"))]
            Some(Waiting::Fake) => true,
            Some(Waiting::Qemu(vm)) => vm.is_alive(),
            None => false,
        }
    }

    /// Ends it and removes what the engine made for it.
    pub async fn cancel(self) {
        if let Some(Waiting::Qemu(vm)) = &self.waiting
            && let Err(error) = vm.end().await
        {
            tracing::warn!(%error, "cannot end a prepared VM");
        }
        let cleared = blocking(move || {
            drop(self);
            Ok(())
        });
        if let Err(error) = cleared.await {
            tracing::warn!(%error, "a prepared VM left something behind");
        }
    }

    /// For a thaw of this image, by the engine whose part `pick` takes. From here on the caller
    /// clears the paths.
    pub(crate) fn take<T>(
        mut self,
        image: &Image,
        pick: impl FnOnce(Waiting) -> std::result::Result<T, Waiting>,
    ) -> Result<(VmPaths, T)> {
        let wrong = |what| Err(EngineError::Monitor(format!("was prepared for a different {what}")));
        if self.image != *image {
            return wrong("image");
        }
        match self.waiting.take().map(pick) {
            Some(Ok(taken)) => Ok((self.paths.clone(), taken)),
            Some(Err(other)) => {
                self.waiting = Some(other);
                wrong("engine")
            }
            None => wrong("thaw"),
        }
    }
}

impl Drop for PreparedVm {
    fn drop(&mut self) {
        let ended = match self.waiting.take() {
            None => return,
            Some(Waiting::Kvm(_)) => Ok(()),
            #[cfg(any(test, feature = "fake"))]
            Some(Waiting::Fake) => Ok(()),
            Some(Waiting::Qemu(vm)) => vm.kill(&self.paths.dir),
        };
        if let Err(error) = ended.and_then(|()| record::clear(&self.paths)) {
            tracing::warn!(%error, "a prepared VM left something behind");
        }
    }
}
