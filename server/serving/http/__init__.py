"""HTTP/REST: the protocol's methods and inference in KServe's and Triton's JSON spelling (docs/reference/http.md)."""
