//! The page: one document with embedded style and script, which only loads the daemon's own figures.

/// The page.
pub const PAGE_HTML: &str = concat!(
    "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>Pagefold</title>\n",
    "<link rel=\"icon\" href=\"data:,\">\n<style>",
    include_str!("page/page.css"),
    "</style>\n</head>\n",
    include_str!("page/page.html"),
    "<script>",
    include_str!("page/page.js"),
    "</script>\n</body>\n</html>\n"
);

/// The Content Security Policy of the page: a browser may only run this script, apply this style, and request this
/// server. The hashes are SHA-256 of the text between the tags.
pub const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; connect-src 'self'; img-src data:; \
     script-src 'sha256-75tw9PBFN/tQUdhDXwCTZ0XVQHD1WGv8U+xUPsXmjl4='; \
     style-src 'sha256-av//bwj6FaaDR/UeI3xzSSqDFQZT844PXeouZuEKcGM='; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

#[cfg(test)]
mod tests {
    use super::*;
    use base64::prelude::{BASE64_STANDARD, Engine as _};
    use sha2::{Digest, Sha256};

    #[test]
    fn csp_hashes_match_script_and_style() {
        for (what, text) in [("script", include_str!("page/page.js")), ("style", include_str!("page/page.css"))] {
            let source = format!("{what}-src 'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(text)));
            assert!(CONTENT_SECURITY_POLICY.contains(&source), "CONTENT_SECURITY_POLICY must contain: {source}");
        }
    }

    #[test]
    fn page_loads_nothing_from_elsewhere() {
        for elsewhere in ["http://", "https://", " src=", "@import", "url("] {
            // The SVG namespace is a name that is not loaded.
            let page = PAGE_HTML.replace("http://www.w3.org/2000/svg", "");
            assert!(!page.contains(elsewhere), "the page mentions {elsewhere}");
        }
        for markup in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"] {
            assert!(!PAGE_HTML.contains(markup), "the script creates markup from text with {markup}");
        }
    }
}
