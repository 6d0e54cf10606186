# CPU image of sparsegdn-server: docker build -t sparsegdn-server .
# Serve a model folder:          docker run -p 8500:8500 -p 9500:9500 -v DIR:/model:ro sparsegdn-server
FROM debian:bookworm-slim AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY deploy/packages.sh deploy/
RUN . deploy/packages.sh && ensure_packages "${build_packages[@]}"
COPY . .
RUN cmake --preset release -DSPARSEGDN_CUDA=OFF -DSPARSEGDN_TESTS=OFF \
    && cmake --build --preset release --target sparsegdn-server sparsegdn \
    && strip build/release/bin/sparsegdn-server build/release/bin/sparsegdn

FROM debian:bookworm-slim
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
       libgrpc++1.51 libprotobuf32 libabsl20220623 libprometheus-cpp-core1.0 libspdlog1.10 \
       libcpp-httplib0.11 libdnnl2 libopenblas0-pthread libhwy1 libzstd1 libxxhash0 libssl3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/build/release/bin/sparsegdn-server /src/build/release/bin/sparsegdn /usr/local/bin/
USER 65532:65532
EXPOSE 8500 9500
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=60s --interval=10s \
    CMD ["/usr/local/bin/sparsegdn", "info", "--target", "127.0.0.1:8500"]
ENTRYPOINT ["/usr/local/bin/sparsegdn-server"]
CMD ["--model", "/model", "--listen", "0.0.0.0:8500", "--metrics-listen", "0.0.0.0:9500"]
