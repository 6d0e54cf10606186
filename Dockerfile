# Image of sparsegdn-server.
#   docker build -t sparsegdn-server:cuda .                        CUDA 13 runtime, Ubuntu 24.04
#   docker build --build-arg BACKEND=cpu -t sparsegdn-server .     CPU, Debian 12
# Serve a model folder:
#   docker run --read-only -p 8500:8500 -p 9500:9500 -v DIR:/model:ro sparsegdn-server
# Runs under any UID and writes nothing but what it is told to. SIGTERM drains: give `docker stop`
# a time above --drain-seconds.
ARG BACKEND=cuda
ARG CUDA_VERSION=13.0.1

FROM debian:bookworm-slim AS build-cpu
FROM debian:bookworm-slim AS run-cpu
FROM nvidia/cuda:${CUDA_VERSION}-cudnn-devel-ubuntu24.04 AS build-cuda
FROM nvidia/cuda:${CUDA_VERSION}-cudnn-runtime-ubuntu24.04 AS run-cuda

FROM build-${BACKEND} AS build
ARG BACKEND
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY deploy/packages.sh deploy/
RUN . deploy/packages.sh && ensure_packages "${build_packages[@]}"
COPY . .
RUN if [ "$BACKEND" = cuda ]; then \
      . deploy/packages.sh && ensure_packages python3-pip && deploy/get_cudnn_frontend.sh; \
    fi
RUN case "$BACKEND" in cpu) cuda=OFF ;; cuda) cuda=ON ;; esac \
    && cmake --preset release -DSPARSEGDN_CUDA="$cuda" -DSPARSEGDN_TESTS=OFF \
    && cmake --build --preset release --target sparsegdn-server sparsegdn \
    && strip build/release/bin/sparsegdn-server build/release/bin/sparsegdn
# The packages that own the libraries these two load: the runtime image installs those and no others.
RUN ldd build/release/bin/sparsegdn-server build/release/bin/sparsegdn \
    | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u | xargs -r realpath | sort -u \
    | while read -r file; do \
        dpkg-query -S "$file" 2>/dev/null || dpkg-query -S "${file#/usr}" 2>/dev/null \
        || { [[ $file == /usr/local/* ]] || { echo "no package owns $file" >&2; exit 1; }; }; \
      done | cut -d: -f1 | sort -u >runtime-packages.txt \
    && cat runtime-packages.txt

FROM run-${BACKEND}
COPY --from=build /src/runtime-packages.txt /tmp/
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive xargs -a /tmp/runtime-packages.txt \
       apt-get install -y --no-install-recommends \
    && rm -rf /var/lib/apt/lists/* /tmp/runtime-packages.txt
COPY --from=build /src/build/release/bin/sparsegdn-server /src/build/release/bin/sparsegdn \
     /usr/local/bin/
# A library that the runtime image lacks fails here, not in production. libcuda.so.1 comes with the
# driver, from the container runtime.
RUN ! ldd /usr/local/bin/sparsegdn-server /usr/local/bin/sparsegdn | grep 'not found' \
      | grep -v 'libcuda\.so' \
    && sparsegdn --help >/dev/null
USER 65532:65532
EXPOSE 8500 9500
STOPSIGNAL SIGTERM
# Over HTTP, so that it also works when gRPC asks for client certificates.
HEALTHCHECK --start-period=600s --interval=10s --timeout=5s --retries=3 \
    CMD ["/bin/bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9500 && printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q '^HTTP/1.[01] 200' <&3"]
ENTRYPOINT ["/usr/local/bin/sparsegdn-server"]
CMD ["--model", "/model", "--listen", "0.0.0.0:8500", "--metrics-listen", "0.0.0.0:9500"]
