//! Builds: a kernel and a root disk are made from packages, baked, and put into place.

use super::{Baked, Building, bake::Recipe};
use crate::{
    daemon::{self, Inner},
    error::{Error, Result},
    records::{TemplateRecord, rfc3339},
};
use keiki_api::request;
use keiki_image::{Builder, Catalog, TemplateSpec};
use keiki_sys::{error_chain, failpoint};
use keiki_types::{
    Shape, Sharing, TemplateName,
    api::{Build, BuildTemplate, Template},
};
use std::sync::Arc;
use time::OffsetDateTime;

impl Inner {
    fn catalog(&self) -> Catalog {
        Catalog::new(self.config.templates_dir.clone())
    }

    pub(crate) async fn templates_view(&self) -> Result<Vec<Template>> {
        let mut all: Vec<Template> =
            self.journal.records.all::<TemplateRecord>().await?.iter().map(view).collect();
        let catalog = self.catalog();
        for name in catalog.names() {
            if all.iter().any(|template| template.name == name) {
                continue;
            }
            match catalog.get(&name) {
                Ok(spec) => all.extend(spec.as_ref().map(missing)),
                // A request to build it gets the error.
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "a template is not listed")
                }
            }
        }
        for template in &mut all {
            if self.templates.running(&template.name).is_some() {
                template.status = "building".into();
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    pub(crate) async fn build_template(self: &Arc<Self>, request: BuildTemplate) -> Result<Build> {
        let name: TemplateName =
            request.name.parse().map_err(|error| Error::Invalid(format!("name: {error}")))?;
        let catalog = self.catalog();
        let found = catalog.get(name.as_str());
        let spec = found.map_err(|error| Error::Invalid(error_chain(&error)))?.ok_or_else(|| {
            Error::NotFound(format!("no template {name}; there are: {}", catalog.names().join(", ")))
        })?;
        let shape = request::build_shape(&request, spec.shape)?;
        let mut building = self.templates.building.lock().await;
        if self.under_way.is_closed() {
            return Err(daemon::stopping());
        }
        let (build, is_new) = self.templates.begin(&spec.name);
        if is_new {
            let (node, build) = (Arc::clone(self), Arc::clone(&build));
            while building.try_join_next().is_some() {}
            building.spawn(async move {
                let done = node.build(&spec, shape, &request, &build).await;
                build.progress.send_modify(|progress| {
                    progress.view.ended_at = rfc3339(OffsetDateTime::now_utc());
                    match done {
                        Ok(()) => progress.view.status = "done".into(),
                        Err(error) => {
                            tracing::error!(
                                template = spec.name,
                                error = &error as &dyn std::error::Error,
                                "build failed"
                            );
                            progress.view.status = "failed".into();
                            progress.view.error = error_chain(&error);
                            progress.lines.push(format!("failed: {}", error_chain(&error)));
                        }
                    }
                });
            });
        }
        let now = build.progress.borrow().view.clone();
        Ok(now)
    }

    async fn build(
        self: &Arc<Self>,
        spec: &TemplateSpec,
        shape: Shape,
        request: &BuildTemplate,
        build: &Arc<Building>,
    ) -> Result<()> {
        let _armed = failpoint::arm("build");
        let cache = self.config.cache_dir.clone().unwrap_or_else(|| self.store.in_data("cache"));
        let (guest, say) = (self.config.guest_binary.clone(), Arc::clone(build));
        let recipe = keiki_image::RootfsSpec { disk_mib: shape.disk_mib, ..spec.rootfs() };
        let refresh = request.force;
        let parts = tokio::task::spawn_blocking(move || {
            let builder = Builder::new(cache, Arc::new(move |line: &str| say.say(line))).refresh(refresh);
            builder.template(&recipe, &guest)
        });
        let parts = parts
            .await
            .map_err(|cause| Error::internal("the build was interrupted", cause))?
            .map_err(|cause| Error::internal(format!("template {} cannot be built", spec.name), cause))?;
        let version = version_of(&parts.digest, &spec.warm, shape, &self.engine_version);
        let current =
            self.templates.state.lock().baked.get(&spec.name).map(|baked| baked.record.version.clone());
        // Another bake of the same contents has the time behind its version.
        let is_same = current.is_some_and(|current| current.starts_with(&version));
        if is_same && !request.force && !request.rebake {
            build.say("nothing to do: it is already baked from exactly these inputs");
            return Ok(());
        }
        build.progress.send_modify(|progress| progress.view.status = "baking".into());
        let version = if is_same {
            format!("{version}-{}", OffsetDateTime::now_utc().unix_timestamp())
        } else {
            version
        };
        let dir = self.store.template(&spec.name, &version);
        let claim = self.sources.claim(&dir).await;
        self.store.remove(dir.clone()).await?;
        drop(claim);
        let recipe = Recipe { spec, shape, version: &version, parts: &parts };
        let baked = self.bake(&recipe, &dir, build).await;
        match baked {
            Ok(record) => self.install_template(record, build).await,
            Err(error) => {
                self.store.remove(dir).await?;
                Err(error)
            }
        }
    }

    async fn install_template(self: &Arc<Self>, record: TemplateRecord, build: &Building) -> Result<()> {
        let dir = self.store.template(&record.name, &record.version);
        let frozen = self.fleet.load(&dir, Sharing::Node).await?;
        failpoint::reach("load");
        self.journal.records.put(vec![record.clone()]).await?;
        build.say(&format!("done: {} version {}", record.name, record.version));
        let baked = Baked::new(record.clone(), frozen);
        let old = self.templates.state.lock().baked.insert(record.name.clone(), Arc::clone(&baked));
        if let Some(old) = old {
            self.retire(&old).await?;
        }
        self.refill(&baked);
        Ok(())
    }
}

/// The name of a bake's directory: what decides whether it can be used again. Digests of earlier
/// nodes were made in another way; a template of such a name is used as it is recorded, and rebuilt
/// by its next build.
fn version_of(digest: &str, warm: &[String], shape: Shape, engine: &str) -> String {
    let shape = format!("{} {} {}", shape.vcpus, shape.memory_mib, shape.disk_mib);
    let mut hasher = blake3::Hasher::new();
    for part in [digest, &shape, engine].into_iter().chain(warm.iter().map(String::as_str)) {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    let contents: String = digest.chars().take(12).collect();
    // First what distinguishes two shapes of the same contents: tables show the beginning.
    format!("{}-{contents}", &hasher.finalize().to_hex()[..8])
}

fn view(record: &TemplateRecord) -> Template {
    Template {
        name: record.name.clone(),
        version: record.version.clone(),
        cpu: record.shape.vcpus,
        memory_mb: record.shape.memory_mib,
        disk_mb: record.shape.disk_mib,
        size_bytes: record.size_bytes,
        status: "ready".into(),
        description: record.description.clone(),
        created_at: rfc3339(record.created_at),
        cold_boot_ms: Some(record.cold_boot_ms),
        kernel: record.kernel.clone(),
    }
}

fn missing(spec: &TemplateSpec) -> Template {
    Template {
        name: spec.name.clone(),
        version: String::new(),
        cpu: spec.shape.vcpus,
        memory_mb: spec.shape.memory_mib,
        disk_mb: spec.shape.disk_mib,
        size_bytes: 0,
        status: "missing".into(),
        description: spec.description.clone(),
        created_at: String::new(),
        cold_boot_ms: None,
        kernel: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::version_of;
    use keiki_types::Shape;

    #[test]
    fn a_version_is_the_same_for_every_toolchain_and_tells_all_parts_apart() {
        let shape = Shape { vcpus: 1, memory_mib: 256, disk_mib: 2048 };
        let warm = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect::<Vec<_>>();
        let of =
            |digest: &str, lines: &[&str], shape, engine| version_of(digest, &warm(lines), shape, engine);
        let first = of("0123456789abcdef", &["a"], shape, "kvm 1");
        assert_eq!(first, "705eba1a-0123456789ab");
        for other in [
            of("1123456789abcdef", &["a"], shape, "kvm 1"),
            of("0123456789abcdef", &["a", ""], shape, "kvm 1"),
            of("0123456789abcdef", &["b"], shape, "kvm 1"),
            of("0123456789abcdef", &["a"], Shape { vcpus: 2, ..shape }, "kvm 1"),
            of("0123456789abcdef", &["a"], shape, "kvm 2"),
        ] {
            assert_ne!(first, other);
        }
    }
}
