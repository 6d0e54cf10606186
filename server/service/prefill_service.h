// The four methods of sparsegdn.v1.PrefillService, each handed to its adapter.
#ifndef SPARSEGDN_SERVER_SERVICE_PREFILL_SERVICE_H_
#define SPARSEGDN_SERVER_SERVICE_PREFILL_SERVICE_H_

#include <functional>
#include <string>
#include <utility>

#include "server/engine/engine.h"
#include "server/service/context.h"
#include "sparsegdn/v1/prefill.grpc.pb.h"

namespace sparsegdn::service {

// Raw methods: tensor frames are written without a copy, and of bytes that are no message gRPC
// itself would say UNIMPLEMENTED without a word, or on a stream that the client had ended it.
using PrefillServiceBase = v1::PrefillService::WithRawCallbackMethod_Prefill<
    v1::PrefillService::WithRawCallbackMethod_ImportSnapshot<
        v1::PrefillService::WithRawCallbackMethod_ReleaseSnapshot<
            v1::PrefillService::WithRawCallbackMethod_GetModelInfo<v1::PrefillService::Service>>>>;

class PrefillServiceImpl final : public PrefillServiceBase {
 public:
  // `limits` gives those in force, for GetModelInfo.
  PrefillServiceImpl(const ServiceContext& service, std::string version,
                     std::function<engine::EngineLimits()> limits)
      : service_(service), version_(std::move(version)), limits_(std::move(limits)) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Prefill(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* ImportSnapshot(grpc::CallbackServerContext* context,
                                                            grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ReleaseSnapshot(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;

 private:
  const ServiceContext service_;
  const std::string version_;
  const std::function<engine::EngineLimits()> limits_;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_PREFILL_SERVICE_H_
