// Lists of addresses, and socket files: which one may be replaced, who may use it.
#include "server/service/listeners.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/unit/service/service_fixture.h"

namespace sparsegdn::service {
namespace {

TEST(ListenList, Rows) {
  const auto good = ParseListenList("127.0.0.1:0,unix:/run/x/g.sock,[::1]:7,unix:///tmp/y", "--l");
  ASSERT_TRUE(good.ok()) << good.status();
  ASSERT_EQ(good->size(), 4u);
  EXPECT_EQ(ToText((*good)[0]), "127.0.0.1:0");
  EXPECT_EQ(ToText((*good)[1]), "unix:/run/x/g.sock");
  EXPECT_EQ(ToText((*good)[3]), "unix:/tmp/y");
  for (const ListenAddress& address : *good) EXPECT_TRUE(IsLocal(address));
  EXPECT_FALSE(IsLocal((*ParseListenList("0.0.0.0:1", "--l"))[0]));
  EXPECT_FALSE(IsLocal((*ParseListenList(":1", "--l"))[0]));
  std::string many = "127.0.0.1:1";
  for (size_t i = 0; i < kMaxListeners; ++i) many += ",127.0.0.1:1";
  for (const std::string& wrong :
       {std::string(), std::string("127.0.0.1:0,"), std::string(",127.0.0.1:0"),
        std::string("unix:"), std::string("unix:relative"), std::string("unix:/"),
        std::string("unix://host/path"), "unix:/" + std::string(200, 'x'),
        std::string("unix:/a,unix:/a"), std::string("unix:/a,50051"), many}) {
    const auto list = ParseListenList(wrong, "--listen");
    ASSERT_TRUE(absl::IsInvalidArgument(list.status())) << wrong;
    EXPECT_NE(list.status().ToString().find("--listen"), std::string::npos);
  }
}

class SocketFileTest : public ServiceTest {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/sock-" + std::to_string(getpid());
    std::filesystem::create_directory(folder_);
    path_ = folder_ + "/g.sock";
  }
  void TearDown() override {
    ServiceTest::TearDown();
    std::filesystem::remove_all(folder_);
  }
  // A socket that is bound; without listen() it is what a killed server leaves.
  int BindSocket(bool listening) {
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listening ? listen(fd, 1) : 0, 0);
    return fd;
  }
  ServerConfig Both(const std::string& mode = "0600") const {
    ServerConfig config = LoopbackConfig();
    config.listen += ",unix:" + path_;
    config.unix_socket_mode = mode;
    return config;
  }
  grpc::Status InfoOver(const std::string& target) {
    const auto channel = grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
    v1::ModelInfo info;
    return v1::PrefillService::NewStub(channel)->GetModelInfo(Context().get(), {}, &info);
  }
  std::string folder_, path_;
};

TEST_F(SocketFileTest, BothListenersServeAndTheFileGoesWithTheServer) {
  for (const char* mode : {"0600", "0660", "0666"}) {
    Start(Both(mode));
    struct stat info {};
    ASSERT_EQ(lstat(path_.c_str(), &info), 0);
    EXPECT_TRUE(S_ISSOCK(info.st_mode));
    EXPECT_EQ(info.st_mode & 07777, std::stoul(mode, nullptr, 8));
    EXPECT_TRUE(InfoOver("unix:" + path_).ok());
    EXPECT_TRUE(InfoOver("127.0.0.1:" + std::to_string(server_->port())).ok());
    server_->Shutdown(std::chrono::nanoseconds(0));
    EXPECT_NE(access(path_.c_str(), F_OK), 0);
  }
}

TEST_F(SocketFileTest, AUnixSocketAlone) {
  ServerConfig config = LoopbackConfig();
  config.listen = "unix:" + path_;
  server_ = Server::Start(config).value();  // the fixture's own channel is of TCP
  server_->Serve(std::make_shared<FakeEngine>());
  EXPECT_EQ(server_->port(), 0);
  EXPECT_TRUE(InfoOver("unix:" + path_).ok());
}

TEST_F(SocketFileTest, AStaleSocketIsReplacedAndALiveOneIsNot) {
  close(BindSocket(/*listening=*/true));  // nobody is there any more
  ASSERT_EQ(access(path_.c_str(), F_OK), 0);
  Start(Both());
  EXPECT_TRUE(InfoOver("unix:" + path_).ok());
  const auto second = Server::Start(Both());
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_TRUE(InfoOver("unix:" + path_).ok());  // the first one's file is still its own
}

TEST_F(SocketFileTest, AFileThatIsNoSocketStays) {
  std::ofstream(path_) << "mine";
  const auto server = Server::Start(Both());
  EXPECT_TRUE(absl::IsInvalidArgument(server.status())) << server.status();
  EXPECT_EQ(std::filesystem::file_size(path_), 4u);
  std::filesystem::remove(path_);
  std::filesystem::create_symlink("/etc/passwd", path_);
  EXPECT_TRUE(absl::IsInvalidArgument(Server::Start(Both()).status()));
  EXPECT_TRUE(std::filesystem::is_symlink(path_));
}

TEST_F(SocketFileTest, AFolderThatIsNotThereIsAClearError) {
  ServerConfig config = LoopbackConfig();
  config.listen = "unix:/nonexistent-folder/g.sock";
  const auto server = Server::Start(config);
  EXPECT_TRUE(absl::IsUnavailable(server.status())) << server.status();
  EXPECT_NE(server.status().ToString().find("/nonexistent-folder"), std::string::npos);
}

TEST_F(SocketFileTest, AFileThatAnotherTookStays) {
  auto file = UnixSocketFile::Prepare(path_, "--listen");
  ASSERT_TRUE(file.ok()) << file.status();
  close(BindSocket(true));
  ASSERT_TRUE((*file)->Bound(0600).ok());
  // Another server's, by now: renamed over ours, so that its inode cannot be the old one again.
  const std::string first = path_;
  path_ = folder_ + "/other.sock";
  close(BindSocket(true));
  ASSERT_EQ(rename(path_.c_str(), first.c_str()), 0);
  file->reset();
  EXPECT_EQ(access(first.c_str(), F_OK), 0);
}

}  // namespace
}  // namespace sparsegdn::service
