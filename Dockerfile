# Two images:
#   docker build --tag gangway .                             compiles models when they are loaded
#   docker build --target serve --tag gangway:serve .        only serves what a cache holds: no TVM, onnx, onnxruntime
# The legacy builder, BuildKit and buildah build it. BASE_IMAGE: any Debian or Ubuntu with Python 3.11 or later.
ARG BASE_IMAGE=debian:12-slim

FROM ${BASE_IMAGE} AS build
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
      binutils gcc libc6-dev python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/tools && /opt/tools/bin/pip install --no-cache-dir "setuptools>=80" \
 && python3 -m venv --without-pip /opt/gangway
ENV PIP="/opt/tools/bin/pip --python /opt/gangway/bin/python install --no-cache-dir" \
    PACKAGES="/opt/gangway/lib/python3*/site-packages"
WORKDIR /src
COPY constraints.txt pyproject.toml ./
RUN /opt/tools/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" > /tmp/wanted \
 && /opt/tools/bin/pip install --no-cache-dir --requirement /tmp/wanted
# Packages before the code: this layer is used again while only the code changes. Symbols for debuggers are left out
# (uvloop: 12 MB).
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > /tmp/wanted \
 && $PIP --constraint constraints.txt --requirement /tmp/wanted \
 && strip --strip-unneeded $PACKAGES/uvloop/*.so $PACKAGES/httptools/parser/*.so \
 && rm -rf $PACKAGES/numpy/tests $PACKAGES/numpy/*/tests $PACKAGES/uvloop/*.c
COPY . .
RUN /opt/tools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
 && $PIP --no-deps /tmp/wheel/*.whl

# What both images have. Nothing in it is written when it runs, but /cache.
FROM ${BASE_IMAGE} AS runtime
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3 tini \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /usr/share/doc/* /usr/share/man/* /usr/share/locale/*
RUN install --directory --owner=1000 --group=1000 /cache /models
ENV PATH=/opt/gangway/bin:$PATH HOME=/cache PYTHONUNBUFFERED=1
WORKDIR /models
USER 1000:1000
VOLUME ["/cache"]
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
  CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000 && printf 'GET /v2/health/live HTTP/1.0\\r\\n\\r\\n' >&3 && read -r _ status _ <&3 && [ \"$status\" = 200 ]"]
# tini: the kernel does not end process 1 by a signal that it has no handler for, such as a stop in the first moments.
ENTRYPOINT ["tini", "--", "gangway"]
CMD ["serve", "--model-repository=/models", "--cache-dir=/cache", "--exit-on-error=true"]

FROM runtime AS serve
COPY --from=build /opt/gangway /opt/gangway

# Left out: headers of CUTLASS (26 MB), test data of onnx (15 MB), onnxruntime's library for C (29 MB; Python has its own)
# and tools for conversion (8 MB), symbols for debuggers (ml_dtypes: 23 MB), and what tokenizers downloads models by (34 MB).
FROM build AS compile
RUN python3 -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*(item for name in ('compile', 'extensions', 'onnxruntime') for item in extras.get(name, ()) if not item.startswith('gangway')), sep='\n')" > /tmp/wanted \
 && $PIP --constraint constraints.txt --requirement /tmp/wanted \
 && python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['embeddings'], sep='\n')" > /tmp/alone \
 && $PIP --no-deps --constraint constraints.txt --requirement /tmp/alone \
 && strip --strip-unneeded $PACKAGES/ml_dtypes/*.so $PACKAGES/tokenizers/*.so \
 && cd /opt/gangway/lib/python3*/site-packages \
 && rm -rf tvm/3rdparty tvm/include tvm/src onnx/backend/test \
      onnxruntime/capi/libonnxruntime.so.* onnxruntime/transformers onnxruntime/tools onnxruntime/quantization

FROM runtime AS full
COPY --from=compile /opt/gangway /opt/gangway
