//! Templates and their builds.

use crate::{error::Result, transport::Client};
use futures::{StreamExt, stream::BoxStream};
use keiki_types::{
    TemplateName,
    api::{Build, BuildTemplate, Template},
};
use reqwest::Method;
use serde::{Deserialize, de::DeserializeOwned};

/// A bare array, or one under `items`: nodes send either.
#[derive(Deserialize)]
#[serde(untagged)]
enum Items<T> {
    Bare(Vec<T>),
    Wrapped { items: Vec<T> },
}

impl Client {
    /// All templates.
    pub async fn templates(&self) -> Result<Vec<Template>> {
        self.items("/v1/templates").await
    }

    /// One template.
    pub async fn template(&self, name: &TemplateName) -> Result<Template> {
        self.get(&format!("/v1/templates/{name}")).await
    }

    /// How long the cold boot of a template took when it was built, in ms, if known.
    pub async fn cold_boot_ms(&self, name: &TemplateName) -> Result<Option<f64>> {
        self.template(name).await.map(|template| template.cold_boot_ms)
    }

    /// Deletes a template. Sandboxes and snapshots made from it stay.
    pub async fn delete_template(&self, name: &TemplateName) -> Result<()> {
        self.remove(&format!("/v1/templates/{name}")).await
    }

    /// Starts a build, or joins the running one.
    pub async fn build_template(&self, request: &BuildTemplate) -> Result<Build> {
        self.post("/v1/templates/build", request).await
    }

    /// All builds.
    pub async fn builds(&self) -> Result<Vec<Build>> {
        self.items("/v1/templates/builds").await
    }

    /// One build.
    pub async fn build(&self, id: &str) -> Result<Build> {
        self.get(&format!("/v1/templates/builds/{}", segment(id))).await
    }

    /// The log of a build, from start to end.
    pub async fn build_log(&self, id: &str) -> Result<BoxStream<'static, Result<String>>> {
        let path = format!("/v1/templates/builds/{}/logs?follow=1", segment(id));
        let events = self.events_of(self.request(Method::GET, &path)).await?;
        let lines = events.map(|event| event.map(|event| event.data));
        let until_end = |line: &Result<String>| {
            let go_on = !matches!(line, Ok(line) if line == "end");
            async move { go_on }
        };
        Ok(lines.take_while(until_end).boxed())
    }

    async fn items<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        Ok(match self.get::<Items<T>>(path).await? {
            Items::Bare(items) | Items::Wrapped { items } => items,
        })
    }
}

/// Encodes a build id as one path segment.
fn segment(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    id.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::segment;

    #[test]
    fn a_segment_stays_one_segment() {
        assert_eq!(segment("0198-ab_c"), "0198-ab_c");
        assert_eq!(segment("a/b?c#d é"), "a%2Fb%3Fc%23d%20%C3%A9");
    }
}
